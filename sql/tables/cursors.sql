-- cursors: how far claims have advanced and what slows them, one narrow row per policy.
--
-- Each claim updates its policy's row, so the page is kept nearly empty: the
-- next version finds room beside the old one and no index is touched.
create table pgreaper.cursors (
  policy_id integer primary key,
  position timestamptz,
  moves bigint not null default 0,
  retried boolean not null default false,
  rate_tokens double precision,
  rate_at timestamptz,
  failing_at timestamptz,
  failing_sqlstate text,
  suspensions integer not null default 0,
  suspended_until timestamptz
) with (fillfactor = 10);

comment on table pgreaper.cursors is 'The forward cursor of each policy; the row lock makes claims of one policy take turns.';
comment on column pgreaper.cursors.policy_id is 'The policy.';
comment on column pgreaper.cursors.position is 'Deadline up to which claims have advanced; NULL: nothing claimed yet.';
comment on column pgreaper.cursors.moves is 'Counts claims and what was given back; a claim that read another number reads again.';
comment on column pgreaper.cursors.retried is 'Whether the last claim took retries, so that the next takes fresh holds first.';
comment on column pgreaper.cursors.rate_tokens is 'Holds that the rate limit had left at rate_at.';
comment on column pgreaper.cursors.rate_at is 'When rate_tokens was last counted.';
comment on column pgreaper.cursors.failing_at is 'When holds last failed alike with no success between; NULL: they do not.';
comment on column pgreaper.cursors.failing_sqlstate is 'How they failed.';
comment on column pgreaper.cursors.suspensions is 'How often in a row the policy was suspended; the rest grows with it.';
comment on column pgreaper.cursors.suspended_until is 'Until when a policy rests whose holds all fail alike.';

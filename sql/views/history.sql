-- history: what happened to which hold, the trail and the events together.
--
-- To ask for one hold use reaper_history(), which finds the few batches that can hold it.
create view pgreaper.history as
select p.name as policy,
       h.key,
       h.deadline,
       'expired'::text as outcome,
       coalesce(t.state, 'expired') as state,
       t.worker,
       t.token,
       t.at,
       null::integer as attempts,
       null::text as error_class,
       null::text as sqlstate,
       null::text as constraint_name,
       null::text as actor,
       null::text as reason
  from pgreaper.transitions as t
  join pgreaper.policies as p on p.policy_id = t.policy_id
 cross join lateral unnest(t.keys, t.deadlines) as h (key, deadline)
union all
select p.name,
       e.key,
       e.deadline,
       e.kind,
       e.state,
       e.worker,
       e.token,
       e.at,
       e.attempts,
       e.error_class,
       e.sqlstate,
       e.constraint_name,
       e.actor,
       e.reason
  from pgreaper.events as e
  join pgreaper.policies as p on p.policy_id = e.policy_id;

comment on view pgreaper.history is 'What happened to which hold; one row per happening.';
comment on column pgreaper.history.policy is 'Name of the policy.';
comment on column pgreaper.history.key is 'The hold; NULL: the policy or a claim as a whole.';
comment on column pgreaper.history.deadline is 'The deadline of the hold at that time.';
comment on column pgreaper.history.outcome is 'expired, or the kind of the event.';
comment on column pgreaper.history.state is 'The state that was written or found.';
comment on column pgreaper.history.worker is 'Who did it, as it called itself.';
comment on column pgreaper.history.token is 'The claim; NULL: a sweep, a command or a person.';
comment on column pgreaper.history.at is 'Database clock.';
comment on column pgreaper.history.attempts is 'Attempts after a failure.';
comment on column pgreaper.history.error_class is 'Kind of a failure.';
comment on column pgreaper.history.sqlstate is 'SQLSTATE of a failure.';
comment on column pgreaper.history.constraint_name is 'Constraint that refused.';
comment on column pgreaper.history.actor is 'Database role of the person who did it.';
comment on column pgreaper.history.reason is 'Why, in that person''s words.';

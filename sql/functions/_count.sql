-- _count: add to a policy's counters; called by what appends to `transitions` and `events`.
--
-- Promises
--   * Waits for nobody: it takes a row that nobody has locked, or makes one.
--   * Counts what commits, and only that.
create function pgreaper._count(
  policy_id integer,
  expired bigint default 0,
  lateness integer[] default '{}',
  at timestamptz default null,
  already_done bigint default 0,
  not_eligible bigint default 0,
  retry bigint default 0,
  dead_letter bigint default 0,
  taken_back bigint default 0
)
returns void
language plpgsql
volatile
security invoker
set search_path = pg_catalog, pg_temp
as $function$
begin
  update pgreaper.totals as t
     set expired = t.expired + _count.expired,
         already_done = t.already_done + _count.already_done,
         not_eligible = t.not_eligible + _count.not_eligible,
         retry = t.retry + _count.retry,
         dead_letter = t.dead_letter + _count.dead_letter,
         taken_back = t.taken_back + _count.taken_back,
         lateness = case when cardinality(_count.lateness) = 0 then t.lateness
                         else array(select coalesce(l.had, 0) + l.more
                                      from unnest(t.lateness, _count.lateness) with ordinality as l (had, more, bucket)
                                     order by l.bucket) end,
         last_success = greatest(t.last_success, _count.at)
   where t.total_id = (
     select f.total_id from pgreaper.totals as f where f.policy_id = _count.policy_id
      order by f.total_id limit 1 for update skip locked);
  if not found then
    insert into pgreaper.totals
      (policy_id, expired, already_done, not_eligible, retry, dead_letter, taken_back, lateness, last_success)
    values
      (_count.policy_id, _count.expired, _count.already_done, _count.not_eligible, _count.retry, _count.dead_letter,
       _count.taken_back, _count.lateness, _count.at);
  end if;
end;
$function$;

comment on function pgreaper._count(integer, bigint, integer[], timestamptz, bigint, bigint, bigint, bigint, bigint) is
'Add to a policy''s counters.';

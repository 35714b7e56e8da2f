-- _unleased: a look at due holds that nobody has, as SQL: the one place that says what counts as due.
--
-- Its rows, in the order of the deadlines: `deadline`; `free`, whether the hold has not failed, which is what
-- `due` counts everywhere; `not_before` of its failure, if it has; `locked`, NULL unless asked for.
--
-- Parameters of the statement: $1 cutoff, $2 the oldest deadline (with `beyond`), $3 keys under a living
-- lease, $4 how many due holds to read at most, $5 the policy.  As many may be leased or failed as are in the books, so
-- whoever reads that many more sees all the free ones he wants.
create function pgreaper._unleased(
  target pgreaper._target,
  beyond boolean default false,
  locked boolean default false
)
returns text
language sql
stable
security invoker
as $function$
  select format(
    'select s.deadline, s.locked, f.not_before, f.key is null as free'
    '  from (select %1$s as key, %2$s as deadline, %3$s as locked'
    '          from %4$s as h where %5$s and %6$s and %7$s order by %8$s limit $4) as s'
    -- IS TRUE, so that they are not merged by the deadline: thousands may have the same.
    '  left join pgreaper.failures as f on f.policy_id operator(pg_catalog.=) $5'
    '   and f.key operator(pg_catalog.=) s.key and (f.deadline operator(pg_catalog.=) s.deadline) is true'
    -- IS NOT TRUE and not NOT: the negated form is not hashed everywhere.
    ' where (s.key operator(pg_catalog.=) any ($3)) is not true',
    target.key, target.deadline,
    case when _unleased.locked and target.plain then 'not ' || pgreaper._unlocked() else 'null::pg_catalog.bool' end,
    target.relation, target.held, target.due,
    case when _unleased.beyond then target.beyond else 'true' end,
    target.deadline_order);
$function$;

comment on function pgreaper._unleased(pgreaper._target, boolean, boolean) is
'A look at due holds that nobody has, as SQL; free ones are what counts as due.';

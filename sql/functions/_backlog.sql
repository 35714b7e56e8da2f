-- _backlog: how many due holds of a policy are how old; each count bounded.
create function pgreaper._backlog(policy pgreaper.policies)
returns table (age text, "position" integer, due bigint, capped boolean)
language plpgsql
volatile
security invoker
set lock_timeout = '200ms'
set jit = off
as $function$
declare
  c_cap constant integer := 10000;
  v_cutoff constant timestamptz := pgreaper._clock() - policy.grace;
  v_target pgreaper._target;
  v_bucket record;
begin
  v_target := pgreaper._target(policy);

  for v_bucket in
    select b.*
      from (values
        (1, 'under 1 minute', interval '0', interval '1 minute'),
        (2, '1 to 5 minutes', '1 minute', '5 minutes'),
        (3, '5 to 60 minutes', '5 minutes', '1 hour'),
        (4, '1 to 24 hours', '1 hour', '1 day'),
        (5, 'over 1 day', '1 day', null)
      ) as b (ordinal, name, younger, older)
  loop
    age := v_bucket.name;
    "position" := v_bucket.ordinal;
    execute format('select count(*) from (select from %s as h where %s and %s%s limit $3) as h',
      v_target.relation, v_target.held, v_target.due,
      case when v_bucket.older is not null then ' and ' || v_target.beyond end)
       into due
      using v_cutoff - v_bucket.younger, v_cutoff - v_bucket.older + interval '1 microsecond', c_cap + 1;
    capped := due > c_cap;
    due := least(due, c_cap);
    return next;
  end loop;
exception
  -- Costs the lines of this policy only; the view `status` says why.
  when others then
    return;
end;
$function$;

comment on function pgreaper._backlog(pgreaper.policies) is 'How many due holds of a policy are how old; each count bounded.';

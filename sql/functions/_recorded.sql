-- _recorded: what the books say became of a claim's holds.
create function pgreaper._recorded(claim pgreaper.claims)
returns setof pgreaper.hold_outcome
language sql
stable
security invoker
as $function$
  select k.key, 'expired', coalesce(t.state, 'expired')
    from pgreaper.transitions as t
   cross join lateral unnest(t.keys) as k (key)
   where t.token = claim.token
  union all
  select e.key, e.kind, e.state
    from pgreaper.events as e
   where e.token = claim.token
     and e.kind in ('already-done', 'not-eligible', 'retry', 'dead-letter');
$function$;

comment on function pgreaper._recorded(pgreaper.claims) is 'Outcomes of a claim''s holds, from trail and events.';

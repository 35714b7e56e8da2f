-- _row_lock: the lock that the transition takes on a hold; no stronger than it needs, and not waited for.
create function pgreaper._row_lock(policy pgreaper.policies)
returns text
language plpgsql
stable
security invoker
as $function$
begin
  return pgreaper._lock_strength(policy, array[policy.status_column, policy.stamp_column]
           || case when policy.set_values <> '{}' then array(select jsonb_object_keys(policy.set_values)) end)
         || ' skip locked';
end;
$function$;

comment on function pgreaper._row_lock(pgreaper.policies) is 'The lock that the transition takes on a hold.';

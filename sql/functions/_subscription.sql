-- _subscription: the logical subscription that brings a target's rows, if there is one.
--
-- What a subscriber holds is a copy, and a late one: a hold that looks overdue here may have
-- been consumed or extended where the application writes.  So a policy whose rows come through
-- an enabled subscription is passive: it is left to the node that publishes them.
-- When the subscription is disabled or dropped, at a switch-over, the policy works at once.
--
-- A view counts as the table that its update would write.
--
-- Promises
--   * NULL where nothing is subscribed to, after one look at an empty catalog.
--   * NULL for a view that the caller may not write; never an error.
create function pgreaper._subscription(policy pgreaper.policies)
returns text
language plpgsql
volatile
security invoker
set search_path = pg_catalog, pg_temp
as $function$
declare
  v_relation regclass;
  v_plan json;
begin
  if not exists (select from pg_catalog.pg_subscription_rel) then
    return null;
  end if;

  v_relation := to_regclass(format('%I.%I', policy.target_schema, policy.target_table));
  if exists (select from pg_catalog.pg_class as c where c.oid = v_relation and c.relkind = 'v') then
    -- Which of the tables behind it is the one, only the rewriter knows.
    begin
      execute format('explain (format json, verbose, costs off) update %s set %2$I = %2$I',
                     v_relation, coalesce(policy.status_column, policy.stamp_column)) into v_plan;
    exception
      -- Whoever may not write it, or finds it broken, has nothing to expire there: a claim says why.
      when others then
        return null;
    end;
    v_plan := coalesce(v_plan #> '{0,Plan,Target Tables,0}', v_plan #> '{0,Plan}');
    v_relation := to_regclass(format('%I.%I', v_plan ->> 'Schema', v_plan ->> 'Relation Name'));
  end if;

  return (
    select min(s.subname)
      from pg_catalog.pg_subscription_rel as r
      join pg_catalog.pg_subscription as s on s.oid = r.srsubid and s.subenabled
     where r.srrelid = v_relation
        or r.srrelid in (select t.relid from pg_partition_tree(v_relation) as t)
        or r.srrelid in (select t.relid from pg_partition_ancestors(v_relation) as t));
end;
$function$;

comment on function pgreaper._subscription(pgreaper.policies) is
'The enabled logical subscription that brings the rows of a policy''s target; NULL: none.';

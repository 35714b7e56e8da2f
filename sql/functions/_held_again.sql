-- _held_again: whether a trigger that ran after the transition made one of these due again.
--
-- Looked at only where such a trigger can be: an AFTER trigger of the user's on the table or on one of its
-- partitions, or anything under a view.  A hold that came back with the same
-- deadline would expire again and again.
create function pgreaper._held_again(
  policy pgreaper.policies,
  target pgreaper._target,
  clock timestamptz,
  keys text[]
)
returns boolean
language plpgsql
volatile
security invoker
as $function$
declare
  v_cutoff constant timestamptz := _held_again.clock - policy.grace;
  v_relation constant regclass := to_regclass(format('%I.%I', policy.target_schema, policy.target_table));
  v_statement text;
  v_found boolean := false;
begin
  if not target.bare and cardinality(_held_again.keys) > 0 and (
    -- What an update of a view comes to, only its rewriting tells.
    not target.plain and not exists (select from pg_catalog.pg_class as c where c.oid = v_relation and c.relkind = 'p')
    or exists (
      select from pg_catalog.pg_trigger as t
       where (t.tgrelid = v_relation or t.tgrelid in (select p.relid from pg_partition_tree(v_relation) as p))
         and not t.tgisinternal
         and t.tgenabled <> 'D'
         -- Bits of tgtype: 2 before, 16 update.
         and t.tgtype & 2 = 0
         and t.tgtype & 16 <> 0)
  ) then
    v_statement := format('select exists (select from %s as h where %s and case when %s and %s then true end)',
      target.relation, target.matches, target.held, target.due);
    perform set_config('search_path', target.search_path, true);
    execute v_statement
       into v_found
      using v_cutoff, null, _held_again.keys;
    perform pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true);
  end if;

  return v_found;
end;
$function$;

comment on function pgreaper._held_again(pgreaper.policies, pgreaper._target, timestamptz, text[]) is
'Whether a trigger that ran after the transition made one of these holds due again.';

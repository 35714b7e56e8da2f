-- _check_target: whether a relation can be a target, and the caller may make it one.
--
-- Raises
--   RP003  another kind of relation, a view that cannot be updated, a parent of inherited
--          tables, a table under row level security (a view: one that it reads), or not the
--          caller's own.
create function pgreaper._check_target(class pg_catalog.pg_class)
returns void
language plpgsql
stable
security invoker
as $function$
declare
  v_name constant text := class.oid::regclass::text;
  v_hiding record;
begin
  if class.relkind not in ('r', 'p', 'v') then
    raise exception '% is %, and only a table or a simple view can hold holds', v_name,
      case class.relkind when 'm' then 'a materialized view' when 'f' then 'a foreign table' when 'i' then 'an index' when 'I' then 'an index'
                         when 'S' then 'a sequence' when 'c' then 'a composite type' else 'a relation of another kind' end
      using errcode = 'RP003', hint = 'Register the table behind it.';
  elsif class.relpersistence = 't' then
    raise exception '% is a temporary table', v_name
      using errcode = 'RP003', hint = 'No other session can see its rows; register a permanent table.';
  elsif class.relnamespace = 'pgreaper'::regnamespace or class.relnamespace = 'pg_catalog'::regnamespace
    or class.relnamespace = 'information_schema'::regnamespace then
    raise exception '% belongs to the system', v_name using errcode = 'RP003', hint = 'Register a table of your own.';
  elsif class.relkind = 'v' and pg_relation_is_updatable(class.oid, false) & (1 << 2) = 0 then
    raise exception 'view % cannot be updated', v_name
      using errcode = 'RP003',
            hint = 'A target view selects from one table, without join, group by, distinct, limit or union; conditions on other tables go into WHERE EXISTS.';
  elsif class.relkind = 'v' and (class.reloptions::text ~ 'check_option') then
    raise exception 'view % has a check option, which would refuse the transition out of it', v_name
      using errcode = 'RP003', hint = 'Create it without WITH CHECK OPTION.';
  elsif class.relkind = 'r' and exists (select from pg_catalog.pg_inherits as i where i.inhparent = class.oid) then
    raise exception '% has child tables, whose keys are not unique together with its own', v_name
      using errcode = 'RP003', hint = 'Register each table of the inheritance tree, or use a partitioned table.';
  elsif row_security_active(class.oid) then
    raise exception 'row level security of % would hide holds from role %', v_name, quote_ident(current_user)
      using errcode = 'RP003',
            hint = 'Register and run as a role with BYPASSRLS, or as the owner of a table that is not under FORCE ROW LEVEL SECURITY.';
  elsif not pg_has_role(class.relowner, 'USAGE') then
    raise exception 'role % does not own %', quote_ident(current_user), v_name
      using errcode = 'RP003',
            hint = 'A policy makes other roles write to the table: let its owner register it.';
  end if;

  if class.relkind = 'v' then
    select t.hiding::regclass::text as name, pg_get_userbyid(t.role) as role into v_hiding
      from pgreaper._hiding(class.oid, quote_ident(current_user)::regrole) as t
     limit 1;
    if found then
      raise exception 'row level security of %, which view % reads, would hide rows from role %',
        v_hiding.name, v_name, quote_ident(v_hiding.role)
        using errcode = 'RP003',
              hint = 'Give the view to a role with BYPASSRLS, or to the owner of a table that is not under FORCE ROW LEVEL SECURITY.';
    end if;
  end if;
end;
$function$;

comment on function pgreaper._check_target(pg_catalog.pg_class) is 'RP003 unless the relation can be a target and the caller may make it one.';

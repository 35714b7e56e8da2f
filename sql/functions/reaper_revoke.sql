-- reaper_revoke: take back what reaper_grant() gave a role on pgreaper.
--
-- What the role may do with a target it may have been given for another reason, so that is
-- not touched: the statements that would take it are returned, with `done` false.
--
-- Promises
--   * The role can call nothing of pgreaper's and read none of its books, also after an upgrade.
--   * Returns the statements; no rows: it had nothing.
--
-- Raises
--   42501  the caller does not own pgreaper.
create function pgreaper.reaper_revoke(role text)
returns setof pgreaper.granted
language plpgsql
volatile
security invoker
set lock_timeout = '2s'
set search_path = pg_catalog, pg_temp
as $function$
declare
  v_role constant oid := (select r.oid from pg_catalog.pg_roles as r where r.rolname = reaper_revoke.role);
  v_kinds text[];
  v_statement text;
  v_row pgreaper.granted;
begin
  perform pgreaper._require_writable();
  if not has_table_privilege('pgreaper.grants', 'delete') then
    raise insufficient_privilege
      using message = format('role %I may not take back rights on pgreaper', current_user),
            hint = 'Let the owner of schema pgreaper call it.';
  end if;

  with forgotten as (
    delete from pgreaper.grants as g where g.role = reaper_revoke.role returning g.kind
  )
  select array_agg(f.kind) into v_kinds from forgotten as f;

  if v_role is null then
    return;
  end if;

  foreach v_statement in array array[
    'revoke all on schema pgreaper from %I', 'revoke all on all tables in schema pgreaper from %I',
    'revoke all on all sequences in schema pgreaper from %I', 'revoke all on all routines in schema pgreaper from %I'
  ] loop
    v_row.statement := format(v_statement, reaper_revoke.role) || ';';
    v_row.done := true;
    if v_kinds is not null or exists (
      select from pg_catalog.pg_namespace as n
       cross join lateral aclexplode(n.nspacl) as a
       where n.oid = 'pgreaper'::regnamespace and a.grantee = v_role and a.grantee <> n.nspowner)
    then
      execute v_row.statement;
      return next v_row;
    end if;
  end loop;

  v_row.done := false;
  for v_row.statement in
    select distinct t.statement
      from unnest(v_kinds) as k (kind)
     cross join lateral pgreaper._kept_rights(reaper_revoke.role, k.kind) as t (statement)
     order by t.statement
  loop
    return next v_row;
  end loop;
end;
$function$;

comment on function pgreaper.reaper_revoke(text) is 'Take back what reaper_grant() gave a role on pgreaper; its rights on targets are only told.';

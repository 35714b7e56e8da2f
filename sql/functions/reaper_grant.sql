-- reaper_grant: give an existing role the rights that its work needs, and no more.
--
--   worker     claims, expires and sweeps; on each target `select`, and `update` of the columns that
--              the transition writes.  It cannot write policies.
--   operator   what a worker may, and replays, discards, pauses, resumes, prunes and verifies
--   reader     the views and the history; of a target only key, deadline and state
--   registrar  registers and withdraws policies on tables that it owns
--   application  consumes, extends and restores: of a target `select` on key, deadline and state, and
--              `update` of the columns that these write
--
-- Only what is missing is given, so a second call gives what has come since: a target that was
-- registered, columns that changed, functions of a new version.
--
-- A worker runs the triggers and view functions of its targets, as whoever writes to a table
-- does: it should be a role that trusts their owners.
--
-- Promises
--   * Returns the statements; `done` false: not carried out, with `dry_run` or because the
--     caller may not: let the owner of that table say them.  No rows: nothing was missing.
--   * The role keeps what it has; a member of a superuser's role lacks nothing.
--
-- Raises
--   22023  no such kind.     42704  no such role.     42501  the caller does not own pgreaper.
create function pgreaper.reaper_grant(
  role text,
  kind text,
  dry_run boolean default false
)
returns setof pgreaper.granted
language plpgsql
volatile
security invoker
set lock_timeout = '2s'
set search_path = pg_catalog, pg_temp
as $function$
declare
  v_known constant boolean := exists (
    select from pgreaper.grants as g where g.role = reaper_grant.role and g.kind = reaper_grant.kind);
  v_missing record;
  v_row pgreaper.granted;
begin
  if (reaper_grant.kind in (select r.kind from pgreaper._rights() as r)) is not true then
    raise invalid_parameter_value
      using message = format('there is no kind of role %s', left(quote_nullable(reaper_grant.kind), 100)),
            hint = 'Kinds are worker, operator, reader, registrar and application.';
  elsif not exists (select from pg_catalog.pg_roles as r where r.rolname = reaper_grant.role) then
    raise undefined_object
      using message = format('there is no role %s', left(quote_nullable(reaper_grant.role), 100)),
            hint = 'Rights are given to a role that exists: create role … login.';
  elsif reaper_grant.dry_run is null then
    raise invalid_parameter_value using message = 'dry_run must be true or false, not NULL';
  end if;

  if not reaper_grant.dry_run and not v_known then
    perform pgreaper._require_writable();
    if not has_table_privilege('pgreaper.grants', 'insert') then
      raise insufficient_privilege
        using message = format('role %I may not give away rights on pgreaper', current_user),
              hint = 'Let the owner of schema pgreaper call it.';
    end if;
    insert into pgreaper.grants (role, kind, granted_at, granted_by)
    values (reaper_grant.role, reaper_grant.kind, pgreaper._clock(), session_user)
    on conflict do nothing;
  end if;

  for v_missing in
    select m.statement, m.may from pgreaper._missing_rights(reaper_grant.role, reaper_grant.kind) as m
  loop
    if v_missing.may and not reaper_grant.dry_run then
      execute v_missing.statement;
    end if;
    v_row.statement := v_missing.statement || ';';
    v_row.done := v_missing.may and not reaper_grant.dry_run;
    return next v_row;
  end loop;
end;
$function$;

comment on function pgreaper.reaper_grant(text, text, boolean) is
'Give a role what a worker, operator, reader, registrar or application needs; returns the statements that were missing.';

-- _grant_again: give the roles that reaper_grant() knows what they lack on pgreaper's own objects.
--
-- Called at the end of an installation and of each upgrade.  Targets are not touched then.
create function pgreaper._grant_again()
returns void
language plpgsql
volatile
security invoker
set search_path = pg_catalog, pg_temp
as $function$
declare
  v_statement text;
begin
  for v_statement in
    select m.statement
      from pgreaper.grants as g
     cross join lateral pgreaper._missing_rights(g.role, g.kind) as m
     where m.ours and m.may
  loop
    execute v_statement;
  end loop;
end;
$function$;

comment on function pgreaper._grant_again() is 'Give the roles that reaper_grant() knows what they lack on pgreaper''s own objects.';

-- _missing_rights: the statements that give a role what it lacks of a kind's rights.
--
-- What it has by being a member of another role, or of a superuser's, it does not lack.
--
-- Promises
--   * No rows: the role can do all that its kind can.
--   * `ours`: about pgreaper's own objects, not about a target.
--   * `may`: the current role may carry the statement out.
create function pgreaper._missing_rights(role text, kind text)
returns table (statement text, may boolean, ours boolean)
language sql
stable
security invoker
set search_path = pg_catalog, pg_temp
as $function$
  with subject as (
    select r.oid from pg_catalog.pg_roles as r where r.rolname = _missing_rights.role
  ), wanted as (
    -- 1 schemas, 2 routines, 3 sequences, 4 relations of pgreaper, 5 schemas of targets, 6 targets.
    select 1 as place, 'schema' as object, n.oid, format('%I', n.nspname) as name, n.nspowner as owner, r.privilege, null::text[] as columns
      from pgreaper._rights() as r
      join pg_catalog.pg_namespace as n on n.nspname = r.name
     where r.kind = _missing_rights.kind and r.object = 'schema'
    union all
    select 2, 'routine', p.oid, format('pgreaper.%I', p.proname), p.proowner, r.privilege, null
      from pgreaper._rights() as r
      join pg_catalog.pg_proc as p
        on p.pronamespace = 'pgreaper'::regnamespace
       and (p.proname = r.name or (r.name = '_*' and starts_with(p.proname, '_')))
     where r.kind = _missing_rights.kind and r.object = 'routine'
    union all
    select case r.object when 'sequence' then 3 else 4 end, r.object, c.oid, format('pgreaper.%I', c.relname), c.relowner,
           r.privilege, r.columns
      from pgreaper._rights() as r
      join pg_catalog.pg_class as c on c.relnamespace = 'pgreaper'::regnamespace and c.relname = r.name
     where r.kind = _missing_rights.kind and r.object in ('table', 'sequence')
    union
    select 5, 'schema', n.oid, format('%I', n.nspname), n.nspowner, 'usage', null
      from pgreaper.policies as p
     cross join lateral pgreaper._target_rights(p, _missing_rights.kind) as t
      join pg_catalog.pg_class as c on c.oid = t.relation
      join pg_catalog.pg_namespace as n on n.oid = c.relnamespace
     where p.unregistered_at is null
    union
    select 6, 'table', c.oid, format('%I.%I', n.nspname, c.relname), c.relowner, t.privilege, t.columns
      from pgreaper.policies as p
     cross join lateral pgreaper._target_rights(p, _missing_rights.kind) as t
      join pg_catalog.pg_class as c on c.oid = t.relation
      join pg_catalog.pg_namespace as n on n.oid = c.relnamespace
     where p.unregistered_at is null
  ), lacked as (
    select w.*,
           -- Only so many of the columns as the role lacks.
           case when w.columns is not null then
             array(select u.name from unnest(w.columns) as u (name)
                    where not has_column_privilege(s.oid, w.oid, u.name, w.privilege) order by u.name)
           end as lacking,
           pg_has_role(w.owner, 'usage') or case w.object
             when 'schema' then has_schema_privilege(w.oid, w.privilege || ' with grant option')
             when 'routine' then has_function_privilege(w.oid, w.privilege || ' with grant option')
             when 'sequence' then has_sequence_privilege(w.oid, w.privilege || ' with grant option')
             else has_table_privilege(w.oid, w.privilege || ' with grant option')
           end as may
      from wanted as w
     cross join subject as s
     where case
             when w.object = 'schema' then not has_schema_privilege(s.oid, w.oid, w.privilege)
             when w.object = 'routine' then not has_function_privilege(s.oid, w.oid, w.privilege)
             when w.object = 'sequence' then not has_sequence_privilege(s.oid, w.oid, w.privilege)
             when w.columns is null then not has_table_privilege(s.oid, w.oid, w.privilege)
             else exists (select from unnest(w.columns) as u (name) where not has_column_privilege(s.oid, w.oid, u.name, w.privilege))
           end
  ), worded as (
    select l.*, starts_with(l.name, 'pgreaper._') as helper,
           l.privilege || coalesce((select ' (' || string_agg(quote_ident(u.name), ', ' order by u.name) || ')'
                                      from unnest(l.lacking) as u (name)), '') as wording
      from lacked as l
  ), per_object as (
    -- Several privileges on one relation are one statement.
    select w.place, w.object, w.helper, w.name, w.may, string_agg(w.wording, ', ' order by w.wording) as wording
      from worded as w
     group by w.place, w.object, w.helper, w.name, w.may
  )
  select format('grant %s on %s %s to %I', o.wording, o.object, string_agg(o.name, ', ' order by o.name), _missing_rights.role),
         o.may, o.place <= 4
    from per_object as o
   group by o.place, o.object, o.helper, o.wording, o.may, case when o.place > 4 then o.name end
   order by o.place, o.helper desc, o.may desc, min(o.name);
$function$;

comment on function pgreaper._missing_rights(text, text) is 'The statements that give a role what it lacks of a kind''s rights.';

-- _target: a policy's target as fragments of SQL.
--
-- The one place that knows how a hold is found, told from others and written.
-- Built anew for each call from the catalog, so that a column whose type changes
-- or a table that is swapped under its name needs no registering again.
--
-- States are literals without a type and take the column's own, so that a partial
-- index `(deadline) where status = 'held'` is proven usable under any plan mode and
-- an enum may live in a schema that nobody has on the search_path.
--
-- Whatever is named has its schema, operators too, because these statements run with the
-- caller's search_path.
--
-- A deadline without a zone is compared with the clock converted to the zone, which
-- keeps the index.  Where the clocks are put back that bound is an hour too high;
-- so the exact instant is checked as well, inside a CASE because a far-future value
-- has no instant and must not be asked for one.
--
-- For the application's side of the race (`application`) there are a few more fragments.  An
-- application may be one to which row level security shows only holds of its own: what it does
-- not see is none of its holds.
--
-- Raises
--   42P01, 42703  the target or one of its columns is gone.
--   42804  the deadline or a stamp has another type now, one without a time zone that the policy tells.
--   42501  row level security would hide rows from the current role, or from the one with whose
--          rights a view reads.
create function pgreaper._target(
  policy pgreaper.policies,
  search_path text default pg_catalog.current_setting('search_path'),
  application boolean default false,
  version text default null
)
returns pgreaper._target
language plpgsql
stable
security invoker
as $function$
declare
  v_name constant text := format('%I.%I', policy.target_schema, policy.target_table);
  -- Below it are the types that the server is built with: none is a domain, and all are in pg_catalog.
  c_assigned constant oid := 10000;
  -- Column, bound, instant.
  c_due constant text := '%1$s operator(pg_catalog.<=) %2$s'
    ' and case when %1$s operator(pg_catalog.<=) %2$s then %3$s operator(pg_catalog.<=) $1 end';
  v_wanted text[] := policy.key_columns
    || array_remove(array[policy.deadline_column, policy.status_column, policy.stamp_column, policy.consumed_stamp_column], null)
    || policy.payload_columns;
  v_key_size constant integer := cardinality(policy.key_columns);
  v_found text[];
  v_class record;
  v_generated boolean;
  v_relation constant oid := to_regclass(v_name);
  v_hiding record;
  v_timeless record;
  v_deadline_type oid;
  v_stamp_type oid;
  v_consumed_type oid;
  v_not_null boolean;
  v_until text;
  v_encode text[];
  v_decode text[];
  v_equals text[];
  v_quoted text[];
  v_simple boolean;
  v_foreign boolean;
  v_same text := 'operator(pg_catalog.=)';
  v_zone constant text := quote_literal(policy.zone);
  v_column constant text := format('h.%I', policy.deadline_column);
  v_bound text;
  v_target pgreaper._target;
begin
  if v_relation is null then
    raise undefined_table
      using message = format('%s, the target of policy %I, does not exist', v_name, policy.name),
            hint = 'Bring it back under that name, or withdraw the policy with reaper_unregister().';
  end if;

  -- Asked in every call, so sub-queries are spared where there is nothing to ask.
  if policy.set_values <> '{}' then
    v_wanted := v_wanted || array(select jsonb_object_keys(policy.set_values));
  end if;

  select c.relkind, c.relhasrules, c.relhastriggers,
         c.relhastriggers and exists (
           select from pg_catalog.pg_trigger as t
            where t.tgrelid = c.oid and not t.tgisinternal and t.tgenabled <> 'D' and t.tgtype & 16 <> 0) as watched
    into v_class
    from pg_catalog.pg_class as c where c.oid = v_relation;

  select array_agg(a.attname),
         -- A domain is judged by what it is made of.
         max(coalesce(t.base, a.atttypid)) filter (where a.attname = policy.deadline_column),
         max(coalesce(t.base, a.atttypid)) filter (where a.attname = policy.stamp_column),
         max(coalesce(t.base, a.atttypid)) filter (where a.attname = policy.consumed_stamp_column),
         bool_or(a.attnotnull) filter (where a.attname = policy.stamp_column),
         bool_or(a.attgenerated <> '') filter (where a.attname = policy.deadline_column),
         array_agg(k.encode order by w.position) filter (where w.position <= v_key_size),
         array_agg(k.decode order by w.position) filter (where w.position <= v_key_size),
         bool_or(t.own),
         array_agg(format('h.%I', a.attname) order by w.position) filter (where w.position <= v_key_size)
    into v_found, v_deadline_type, v_stamp_type, v_consumed_type, v_not_null, v_generated, v_encode, v_decode, v_foreign, v_quoted
    from unnest(v_wanted) with ordinality as w (name, position)
    -- Asked in every call: all columns at once, and nothing about types that the server is built with.  OFFSET keeps each of these
    -- as it stands.
    join (
      select a.attname, a.atttypid, a.attnotnull, a.attgenerated
        from pg_catalog.pg_attribute as a
       where a.attrelid = v_relation and a.attnum > 0 and not a.attisdropped offset 0
    ) as a on a.attname = w.name
    left join lateral (
      select nullif(t.typbasetype, 0) as base, t.typnamespace <> 'pg_catalog'::regnamespace and t.typtype <> 'e' as own
        from pg_catalog.pg_type as t where t.oid = a.atttypid and a.atttypid >= c_assigned offset 0
    ) as t on true
    left join lateral (
      select p.encode, p.decode from pgreaper._key_part(a.atttypid) as p where w.position <= v_key_size offset 0
    ) as k on true;

  if v_found is null or not v_found @> v_wanted then
    raise undefined_column
      using message = format('column %I of %s, used by policy %I, does not exist',
              (select w.name from unnest(v_wanted) as w (name) where w.name <> all (coalesce(v_found, '{}')) limit 1),
              v_name, policy.name),
            hint = 'Bring it back, or register the policy again with the columns as they are now.';
  end if;

  if not _target.application and row_security_active(v_relation) then
    raise insufficient_privilege
      using message = format('row level security of %s would hide holds from role %I', v_name, current_user),
            hint = 'Run as a role with BYPASSRLS, or as the owner of a table that is not under FORCE ROW LEVEL SECURITY.';
  elsif not _target.application and v_class.relkind = 'v' then
    select t.hiding::regclass::text as name, pg_get_userbyid(t.role) as role into v_hiding
      from pgreaper._hiding(v_relation, quote_ident(current_user)::regrole) as t
     limit 1;
    if found then
      raise insufficient_privilege
        using message = format('row level security of %s, which view %s reads, would hide holds from role %I', v_hiding.name, v_name, v_hiding.role),
              hint = 'Give that role BYPASSRLS, or the view to the owner of a table that is not under FORCE ROW LEVEL SECURITY.';
    end if;
  end if;

  -- To convert to no zone would make every deadline, and every stamp, NULL.
  if v_deadline_type not in ('timestamptz'::regtype, 'timestamp'::regtype, 'date'::regtype)
    or (v_deadline_type <> 'timestamptz'::regtype and policy.zone is null)
    or v_stamp_type not in ('timestamptz'::regtype, 'timestamp'::regtype, 'date'::regtype)
    or (v_stamp_type <> 'timestamptz'::regtype and coalesce(policy.stamp_zone, policy.zone) is null)
    or v_consumed_type not in ('timestamptz'::regtype, 'timestamp'::regtype, 'date'::regtype)
    or (v_consumed_type <> 'timestamptz'::regtype and coalesce(policy.stamp_zone, policy.zone) is null)
  then
    select w.name, format_type(a.atttypid, a.atttypmod) as type, w.base in ('timestamp'::regtype, 'date'::regtype) as unzoned into v_timeless
      from (values (1, policy.deadline_column, v_deadline_type, policy.zone),
                   (2, policy.stamp_column, v_stamp_type, coalesce(policy.stamp_zone, policy.zone)),
                   (3, policy.consumed_stamp_column, v_consumed_type, coalesce(policy.stamp_zone, policy.zone))) as w (place, name, base, zone)
      join pg_catalog.pg_attribute as a on a.attrelid = v_relation and a.attname = w.name
     where w.base <> 'timestamptz'::regtype and (w.zone is null or w.base not in ('timestamp'::regtype, 'date'::regtype))
     order by w.place
     limit 1;
    raise datatype_mismatch
      using message = format('column %I of %s has type %s now, %s', v_timeless.name, v_name, v_timeless.type,
              case when v_timeless.unzoned then format('and policy %I tells no time zone for it', policy.name)
                   else format('which is no time that policy %I could work with', policy.name) end),
            hint = case when v_timeless.unzoned
              then 'Register the policy again with the zone that its values are meant in, such as zone => ''UTC'', or give the column back its type.'
              else 'Give the column back a type of timestamp or date, or register another one.' end;
  end if;

  -- Nearly always the server's own.
  if v_foreign then
    select array_agg(pgreaper._equals(a.atttypid) order by k.position) into v_equals
      from unnest(policy.key_columns) with ordinality as k (name, position)
      join pg_catalog.pg_attribute as a on a.attrelid = v_relation and a.attname = k.name;
    select pgreaper._equals(a.atttypid) into v_same
      from pg_catalog.pg_attribute as a where a.attrelid = v_relation and a.attname = policy.status_column;
  else
    v_equals := array_fill(v_same, array[v_key_size]);
  end if;

  v_target.search_path := _target.search_path;
  v_target.version := _target.version;
  v_target.plain := v_class.relkind = 'r';
  v_target.bare := v_target.plain and not v_class.watched and not v_class.relhasrules
    and not v_generated and not policy.set_values ? policy.deadline_column;
  v_target.settle := not v_target.plain or v_class.relhastriggers;
  -- ONLY: a child table has its own primary key, so the same key may live there.
  v_target.relation := case when v_class.relkind = 'r' then 'only ' else '' end || v_name;

  -- Key.
  if cardinality(v_quoted) = 1 then
    v_simple := starts_with(v_decode[1], '(%1$s)::');
    v_target.key := format(v_encode[1], v_quoted[1]);
    v_target.matches := case
      when v_simple then format('%s %s any ($3%s[])', v_quoted[1], v_equals[1], substr(v_decode[1], length('(%1$s)') + 1))
      else format('%s %s any (array(select %s from pg_catalog.unnest($3) as k (key)))',
             v_quoted[1], v_equals[1], format(v_decode[1], 'k.key'))
    end;
  else
    v_target.key := format('pg_catalog.json_build_array(%s)::pg_catalog.text',
      (select string_agg(format(e.encode, v_quoted[e.position]), ', ' order by e.position)
         from unnest(v_encode) with ordinality as e (encode, position)));
    v_target.matches := format('exists (select from pg_catalog.unnest($3) as k (key) where %s)',
      (select string_agg(format('%s %s %s', v_quoted[d.position], v_equals[d.position],
                           format(d.decode, format('k.key::pg_catalog.json operator(pg_catalog.->>) %s', d.position - 1))),
                ' and ' order by d.position)
         from unnest(v_decode) with ordinality as d (decode, position)));
  end if;
  if not v_target.plain then
    v_target.key_columns := (
      select string_agg(format('%s as k%s', q.name, q.position), ', ' order by q.position)
        from unnest(v_quoted) with ordinality as q (name, position));
    v_target.same_key := (
      select string_agg(format('%s %s l.k%s', q.name, v_equals[q.position], q.position), ' and ' order by q.position)
        from unnest(v_quoted) with ordinality as q (name, position));
  end if;

  -- Deadline.
  v_target.deadline_order := v_column;
  if v_deadline_type = 'timestamptz'::regtype then
    v_target.deadline := v_column;
    v_target.due := v_column || ' operator(pg_catalog.<=) $1';
    v_target.beyond := v_column || ' operator(pg_catalog.>=) $2';
    v_target.ahead := format(
      '%1$s operator(pg_catalog.>) $1 and %1$s operator(pg_catalog.<=) ($1 operator(pg_catalog.+) interval ''1 year'')', v_column);
  elsif v_deadline_type = 'timestamp'::regtype then
    v_bound := format('($1 at time zone %s)', v_zone);
    v_target.deadline := format('(%s at time zone %s)', v_column, v_zone);
    v_target.due := format(c_due, v_column, v_bound, v_target.deadline);
    v_target.beyond := format('%s operator(pg_catalog.>=) ($2 at time zone %s)', v_column, v_zone);
    v_target.ahead := format(
      '%1$s operator(pg_catalog.>) %2$s and %1$s operator(pg_catalog.<=) (%2$s operator(pg_catalog.+) interval ''1 year'')',
      v_column, v_bound);
  else
    v_bound := format('(($1 at time zone %s)::pg_catalog.date operator(pg_catalog.-) 1)', v_zone);
    v_target.deadline := format('((%s operator(pg_catalog.+) 1)::timestamp at time zone %s)', v_column, v_zone);
    v_target.due := format(c_due, v_column, v_bound, v_target.deadline);
    v_target.beyond := format('%s operator(pg_catalog.>=) (($2 at time zone %s)::pg_catalog.date operator(pg_catalog.-) 1)', v_column, v_zone);
    v_target.ahead := format(
      '%1$s operator(pg_catalog.>) %2$s and %1$s operator(pg_catalog.<=) (%2$s operator(pg_catalog.+) 366)', v_column, v_bound);
  end if;

  -- State, and what the transition writes.
  if policy.status_column is null then
    v_target.held := format('h.%I is null', policy.stamp_column);
    v_target.ended := format('h.%I is not null', policy.stamp_column);
    v_target.state := format('case when h.%I is not null then %L else %L end', policy.stamp_column, 'expired', 'held');
    if policy.consumed_stamp_column is not null then
      v_target.held := format('h.%I is null and h.%I is null', policy.stamp_column, policy.consumed_stamp_column);
      v_target.state := format('case when h.%I is not null then %L when h.%I is not null then %L else %L end',
        policy.stamp_column, 'expired', policy.consumed_stamp_column, 'consumed', 'held');
    end if;
  else
    if cardinality(policy.held) = 1 then
      v_target.held := format('h.%I %s %L', policy.status_column, v_same, policy.held[1]);
    else
      v_target.held := format('h.%I %s any (%L)', policy.status_column, v_same, policy.held);
    end if;
    v_target.ended := format('h.%I %s %L', policy.status_column, v_same, policy.expired);
    v_target.state := format('h.%I::pg_catalog.text', policy.status_column);
    v_target.assignments := format('%I = %L', policy.status_column, policy.expired);
  end if;
  if policy.stamp_column is not null then
    v_target.assignments := concat_ws(', ', v_target.assignments, format('%I = %s', policy.stamp_column,
      case when v_stamp_type = 'timestamptz'::regtype then '$4'
           else format('($4 at time zone %L)', coalesce(policy.stamp_zone, policy.zone)) end));
  end if;
  if policy.set_values <> '{}' then
    v_target.assignments := concat_ws(', ', v_target.assignments,
      (select string_agg(format('%I = %s', s.key, quote_nullable(s.value)), ', ' order by s.key)
         from jsonb_each_text(policy.set_values) as s));
  end if;

  if not _target.application then
    return v_target;
  end if;

  -- Consumed.
  if policy.consumed is not null then
    v_target.consumed := format('h.%I %s %L', policy.status_column, v_same, policy.consumed);
    v_target.consuming := format('%I = %L', policy.status_column, policy.consumed);
  elsif policy.status_column is null and policy.consumed_stamp_column is not null then
    v_target.consumed := format('h.%I is null and h.%I is not null', policy.stamp_column, policy.consumed_stamp_column);
  end if;
  if policy.consumed_stamp_column is not null then
    v_target.consuming := concat_ws(', ', v_target.consuming, format('%I = %s', policy.consumed_stamp_column,
      case when v_consumed_type = 'timestamptz'::regtype then '$4'
           else format('($4 at time zone %L)', coalesce(policy.stamp_zone, policy.zone)) end));
  end if;

  -- Another deadline.  A day lasts until its end, so it is the one that ends no sooner.
  v_until := case v_deadline_type
    when 'timestamptz'::regtype then '$5'
    when 'timestamp'::regtype then format('($5 at time zone %s)', v_zone)
    else format('(($5 at time zone %s) operator(pg_catalog.-) interval ''1 microsecond'')::pg_catalog.date', v_zone)
  end;
  v_target.instant := case v_deadline_type
    when 'timestamptz'::regtype then v_column
    -- Far-future values have no instant.
    else format('case when %1$s operator(pg_catalog.<) ''200000-01-01''::%2$s then %3$s when %1$s is not null then ''infinity'' end',
           v_column, pgreaper._type_name(v_deadline_type), v_target.deadline)
  end;
  v_target.shorter := format('%s operator(pg_catalog.<) %s', v_column, v_until);
  v_target.extending := format('%I = %s', policy.deadline_column, v_until);
  v_target.restoring := concat_ws(', ', v_target.extending,
    case when policy.status_column is not null then format('%I = %L', policy.status_column, policy.restored) end,
    case when v_not_null is false then format('%I = null', policy.stamp_column) end);

  return v_target;
end;
$function$;

comment on function pgreaper._target(pgreaper.policies, text, boolean, text) is 'A policy''s target as fragments of SQL, built from the catalog.';

-- reaper_register: say which rows of a table or simple view are holds, and what expiring does.
--
-- Declarative: what the call omits has its default, the same call again changes nothing,
-- another call changes the policy to what it says.  Everything is checked now, so that a
-- run does not find out later.
--
-- Promises
--   * Returns the settings that changed, with old and new value; all of them for a new policy.
--   * The target is not changed, and not locked beyond reading its definition (where updates
--     are published: planning one).
--   * With `dry_run` everything is checked and nothing is stored.
--
-- Raises
--   RP003  the target, a column, a value or a right does not fit; the message says which.
--   22023  a budget or an interval that makes no sense.
create function pgreaper.reaper_register(
  policy text,
  target regclass,
  deadline_column text,
  status_column text default null,
  held text[] default null,
  expired text default null,
  owner text default null,
  key_columns text[] default null,
  stamp_column text default null,
  set jsonb default null,
  zone text default null,
  stamp_zone text default null,
  grace interval default '0',
  payload_columns text[] default null,
  lease interval default '1 minute',
  batch integer default 500,
  max_attempts integer default 5,
  permanent_attempts integer default 1,
  backoff_base interval default '1 second',
  backoff_cap interval default '1 hour',
  rate_limit double precision default null,
  max_claims integer default null,
  objective interval default '1 minute',
  dry_run boolean default false,
  consumed text default null,
  consumed_stamp_column text default null,
  restored text default null,
  restore_within interval default null,
  search_path text default pg_catalog.current_setting('search_path')
)
returns setof pgreaper.policy_change
language plpgsql
volatile
security invoker
set search_path = pg_catalog, pg_temp
as $function$
declare
  v_class pg_catalog.pg_class;
  v_new pgreaper.policies;
  v_old pgreaper.policies;
  v_now constant timestamptz := pgreaper._clock();
  v_column record;
  v_published record;
  v_changes pgreaper.policy_change[];
begin
  perform pgreaper._require_writable();
  select c.* into v_class from pg_catalog.pg_class as c where c.oid = reaper_register.target;

  if coalesce(reaper_register.policy, '') !~ '\S' or length(reaper_register.policy) > 200 then
    raise exception 'a policy needs a name of 1 to 200 characters' using errcode = 'RP003';
  elsif coalesce(reaper_register.owner, '') !~ '\S' then
    raise exception 'policy % needs an owner', quote_ident(reaper_register.policy)
      using errcode = 'RP003', hint = 'Name who looks after its dead letters, such as a team or an address.';
  elsif v_class.oid is null then
    raise exception 'the target of policy % does not exist', quote_ident(reaper_register.policy) using errcode = 'RP003';
  end if;

  perform pgreaper._check_target(v_class);

  -- Budgets.
  if (reaper_register.lease between interval '1 second' and interval '1 day') is not true then
    raise invalid_parameter_value
      using message = format('lease must be between 1 second and 1 day, not %s', coalesce(reaper_register.lease::text, 'NULL'));
  elsif (reaper_register.grace between interval '0' and interval '10 years') is not true then
    raise invalid_parameter_value
      using message = format('grace must be between 0 and 10 years, not %s', coalesce(reaper_register.grace::text, 'NULL'));
  elsif (reaper_register.batch between 1 and 10000) is not true then
    raise invalid_parameter_value
      using message = format('batch must be between 1 and 10000, not %s', coalesce(reaper_register.batch::text, 'NULL'));
  elsif (reaper_register.max_attempts >= 1 and reaper_register.permanent_attempts >= 1) is not true then
    raise invalid_parameter_value using message = 'max_attempts and permanent_attempts must be at least 1';
  elsif (reaper_register.backoff_base >= interval '0' and reaper_register.backoff_cap >= reaper_register.backoff_base
         and reaper_register.backoff_cap <= interval '1 year') is not true then
    raise invalid_parameter_value using message = format(
      'backoff_base and backoff_cap must be at least 0, in this order, and at most 1 year, not %s and %s',
      coalesce(reaper_register.backoff_base::text, 'NULL'), coalesce(reaper_register.backoff_cap::text, 'NULL'));
  elsif not coalesce(reaper_register.rate_limit, 1) between 1e-3 and 1e9 then
    raise invalid_parameter_value using message = format('rate_limit must be between 0.001 and 1e9 holds per second, not %s', reaper_register.rate_limit);
  elsif reaper_register.max_claims < 1 then
    raise invalid_parameter_value using message = 'max_claims must be at least 1';
  elsif (reaper_register.objective > interval '0') is not true then
    raise invalid_parameter_value
      using message = format('objective must be positive, not %s', coalesce(reaper_register.objective::text, 'NULL'));
  elsif not coalesce(reaper_register.restore_within, '1 day') between interval '1 millisecond' and interval '10 years' then
    raise invalid_parameter_value
      using message = format('restore_within must be positive and at most 10 years, not %s', reaper_register.restore_within);
  elsif reaper_register.dry_run is null then
    raise invalid_parameter_value using message = 'dry_run must be true or false, not NULL';
  end if;

  v_new.name := reaper_register.policy;
  v_new.target_schema := (select n.nspname from pg_catalog.pg_namespace as n where n.oid = v_class.relnamespace);
  v_new.target_table := v_class.relname;
  v_new.deadline_column := reaper_register.deadline_column;
  v_new.status_column := reaper_register.status_column;
  v_new.stamp_column := reaper_register.stamp_column;
  v_new.consumed_stamp_column := reaper_register.consumed_stamp_column;
  v_new.restore_within := reaper_register.restore_within;
  v_new.set_values := coalesce(reaper_register.set, '{}');
  v_new.zone := pgreaper._zone(reaper_register.zone);
  v_new.stamp_zone := pgreaper._zone(reaper_register.stamp_zone);
  v_new.grace := reaper_register.grace;
  v_new.payload_columns := coalesce(reaper_register.payload_columns, '{}');
  v_new.lease := reaper_register.lease;
  v_new.batch := reaper_register.batch;
  v_new.max_attempts := reaper_register.max_attempts;
  v_new.permanent_attempts := reaper_register.permanent_attempts;
  v_new.backoff_base := reaper_register.backoff_base;
  v_new.backoff_cap := reaper_register.backoff_cap;
  v_new.rate_limit := reaper_register.rate_limit;
  v_new.max_claims := reaper_register.max_claims;
  v_new.owner := reaper_register.owner;
  v_new.objective := reaper_register.objective;

  -- Columns: there, of a type that serves, and writable where the transition writes.
  v_new.key_columns := reaper_register.key_columns;
  perform pgreaper._check_columns(v_class, v_new, reaper_register.search_path);
  v_new.key_columns := pgreaper._find_key(reaper_register.target, reaper_register.key_columns);
  if v_new.set_values ?| v_new.key_columns then
    raise exception 'set names a column of the key (%)', array_to_string(v_new.key_columns, ', ')
      using errcode = 'RP003', hint = 'A hold must keep its key.';
  end if;
  for v_column in
    select a.attname, format_type(a.atttypid, a.atttypmod) as type
      from unnest(v_new.key_columns) as k (name)
      join pg_catalog.pg_attribute as a on a.attrelid = v_class.oid and a.attname = k.name
     where (pgreaper._key_part(a.atttypid)).encode is null
  loop
    raise exception 'key column %.% has type %, whose text form is not unambiguous', reaper_register.target, quote_ident(v_column.attname), v_column.type
      using errcode = 'RP003',
            hint = 'Keys may be integers, numeric, text, uuid, bytea, dates and timestamps, enums and the like.';
  end loop;

  -- States.
  if reaper_register.status_column is null then
    if reaper_register.stamp_column is null then
      raise exception 'policy % has neither a status column nor a stamp column', quote_ident(reaper_register.policy)
        using errcode = 'RP003',
              hint = 'Name the column that tells a held row from an expired one; without a status, a nullable stamp column serves.';
    elsif reaper_register.held is not null or reaper_register.expired is not null then
      raise exception 'held and expired are states of a status column, and policy % names none', quote_ident(reaper_register.policy)
        using errcode = 'RP003', hint = 'Name the status_column, or leave out both: held then means that the stamp is NULL.';
    elsif reaper_register.consumed is not null or reaper_register.restored is not null then
      raise exception 'consumed and restored are states of a status column, and policy % names none', quote_ident(reaper_register.policy)
        using errcode = 'RP003', hint = 'Without a status, a consumed_stamp_column tells that a hold was consumed.';
    end if;
  else
    if coalesce(cardinality(reaper_register.held), 0) = 0 or reaper_register.expired is null
      or array_position(reaper_register.held, null) is not null then
      raise exception 'policy % needs at least one held state and the expired state', quote_ident(reaper_register.policy)
        using errcode = 'RP003', hint = 'A NULL state is never held.';
    end if;
    v_new.held := array(
      select distinct pgreaper._canonical(reaper_register.target, reaper_register.status_column, h.state, reaper_register.search_path)
        from unnest(reaper_register.held) as h (state) order by 1);
    v_new.expired := pgreaper._canonical(reaper_register.target, reaper_register.status_column, reaper_register.expired,
      reaper_register.search_path);
    if v_new.expired = any (v_new.held) then
      raise exception 'state % is both held and expired', quote_literal(v_new.expired)
        using errcode = 'RP003', hint = 'A hold that stays held would be expired for ever.';
    end if;
    v_new := pgreaper._check_application(reaper_register.target, v_new, reaper_register.consumed, reaper_register.restored,
      reaper_register.search_path);
  end if;

  -- Published tables need a replica identity, or every transition would be refused.
  select u.reason, u.remedy into v_published
    from pgreaper._unpublishable(
      reaper_register.target, coalesce(reaper_register.status_column, reaper_register.stamp_column)) as u;
  if v_published.reason is not null then
    raise exception 'updates of % are published, and its replica identity does not allow them', reaper_register.target
      using errcode = 'RP003',
            detail = v_published.reason,
            hint = coalesce(v_published.remedy, 'Change the publication: its row filter or column list needs a column outside the replica identity.');
  end if;

  -- What is there already.
  select p.* into v_old from pgreaper.policies as p where p.name = reaper_register.policy for update;
  if found and (v_old.target_schema, v_old.target_table, v_old.key_columns)
             is distinct from (v_new.target_schema, v_new.target_table, v_new.key_columns) then
    raise exception 'policy % speaks of %, by the key (%)', quote_ident(v_old.name),
      format('%I.%I', v_old.target_schema, v_old.target_table), array_to_string(v_old.key_columns, ', ')
      using errcode = 'RP003',
            hint = 'Its books are about those rows: register the new target or key under another name.';
  end if;

  v_changes := array(
    select row(n.setting, o.value, n.value)::pgreaper.policy_change
      from pgreaper._settings(v_new) as n
      left join pgreaper._settings(v_old) as o on o.setting = n.setting
     where (v_old.policy_id is null and n.value is not null) or o.value is distinct from n.value
     order by n.setting);

  if not reaper_register.dry_run and cardinality(v_changes) > 0 then
    if v_old.policy_id is null then
      v_new.registered_at := v_now;
      v_new.policy_id := nextval(pg_get_serial_sequence('pgreaper.policies', 'policy_id'));
      insert into pgreaper.policies overriding system value values (v_new.*);
      insert into pgreaper.cursors (policy_id) values (v_new.policy_id);
    else
      v_new.policy_id := v_old.policy_id;
      v_new.registered_at := v_old.registered_at;
      v_new.paused_at := v_old.paused_at;
      v_new.pause_reason := v_old.pause_reason;
      update pgreaper.policies as p
         set (deadline_column, status_column, held, expired, stamp_column, consumed, consumed_stamp_column, restored,
              restore_within, set_values, zone, stamp_zone, grace,
              payload_columns, lease, batch, max_attempts, permanent_attempts, backoff_base, backoff_cap, rate_limit,
              max_claims, owner, objective, unregistered_at)
           = (select v_new.deadline_column, v_new.status_column, v_new.held, v_new.expired, v_new.stamp_column, v_new.consumed,
                     v_new.consumed_stamp_column, v_new.restored, v_new.restore_within,
                     v_new.set_values, v_new.zone, v_new.stamp_zone, v_new.grace, v_new.payload_columns, v_new.lease,
                     v_new.batch, v_new.max_attempts, v_new.permanent_attempts, v_new.backoff_base, v_new.backoff_cap,
                     v_new.rate_limit, v_new.max_claims, v_new.owner, v_new.objective, null::timestamptz)
       where p.policy_id = v_old.policy_id;
      -- Other columns or states may make other holds due: look from the start.
      update pgreaper.cursors as c set position = null where c.policy_id = v_old.policy_id;
    end if;
    insert into pgreaper.events (policy_id, kind, at, actor, reason)
    values (v_new.policy_id, 'register', v_now, session_user,
      (select string_agg(c.setting, ', ' order by c.setting) from unnest(v_changes) as c));
  end if;

  return query select c.* from unnest(v_changes) as c;
end;
$function$;

comment on function pgreaper.reaper_register(text, regclass, text, text, text[], text, text, text[], text, jsonb, text, text,
  interval, text[], interval, integer, integer, integer, interval, interval, double precision, integer, interval, boolean, text, text,
  text, interval, text) is
'Say which rows are holds and what expiring does; returns the settings that changed; RP003 when something does not fit.';

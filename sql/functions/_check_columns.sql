-- _check_columns: whether the columns of a policy exist, have types that serve, and can be written.
--
-- Raises
--   RP003  one does not; the message names it.
create function pgreaper._check_columns(
  class pg_catalog.pg_class,
  policy pgreaper.policies,
  search_path text
)
returns void
language plpgsql
stable
security invoker
as $function$
declare
  v_name constant text := class.oid::regclass::text;
  v_column record;
  v_zone_used boolean := false;
  v_stamp_zone_used boolean := false;
  v_stamp text;
begin
  if policy.deadline_column is null then
    raise exception 'policy % needs a deadline column', quote_ident(policy.name) using errcode = 'RP003';
  elsif jsonb_typeof(policy.set_values) <> 'object' then
    raise exception 'set must be a JSON object of column and constant, not %', jsonb_typeof(policy.set_values)
      using errcode = 'RP003', hint = 'Such as {"token": null, "reason": "expired"}.';
  end if;

  for v_column in
    select w.name, w.role, a.attname, a.atttypid, a.atttypmod, a.attgenerated, a.attidentity, a.attnotnull, a.attnum,
           format_type(a.atttypid, a.atttypmod) as type,
           -- Domains are judged by what they are made of.
           coalesce(nullif(t.typbasetype, 0), t.oid) as base,
           (select string_agg(quote_ident(s.attname), ', ' order by s.attnum)
              from pg_catalog.pg_attribute as s
             where s.attrelid = class.oid and s.attnum > 0 and not s.attisdropped) as present
      from (
        select policy.deadline_column as name, 'deadline' as role
        union all select policy.status_column, 'status' where policy.status_column is not null
        union all select policy.stamp_column, 'stamp' where policy.stamp_column is not null
        union all select policy.consumed_stamp_column, 'consumed stamp' where policy.consumed_stamp_column is not null
        union all select policy.deadline_column, 'restored deadline' where policy.restore_within is not null
        union all select s.key, 'set' from jsonb_object_keys(policy.set_values) as s (key)
        union all select k.name, 'key' from unnest(policy.key_columns) as k (name)
        union all select p.name, 'payload' from unnest(policy.payload_columns) as p (name)
      ) as w
      left join pg_catalog.pg_attribute as a
        on a.attrelid = class.oid and a.attname = w.name and a.attnum > 0 and not a.attisdropped
      left join pg_catalog.pg_type as t on t.oid = a.atttypid
  loop
    if v_column.attname is null then
      raise exception '% has no column %', v_name, coalesce(quote_ident(v_column.name), 'NULL')
        using errcode = 'RP003', hint = 'Its columns are ' || v_column.present || '.';
    end if;

    if v_column.role = 'deadline' then
      if v_column.base not in ('timestamptz'::regtype, 'timestamp'::regtype, 'date'::regtype) then
        raise exception 'deadline column %.% has type %', v_name, quote_ident(v_column.name), v_column.type
          using errcode = 'RP003', hint = 'A deadline is a timestamp with or without time zone, or a date.';
      elsif v_column.base <> 'timestamptz'::regtype and policy.zone is null then
        raise exception 'deadline column %.% has type %, which says no time zone', v_name, quote_ident(v_column.name), v_column.type
          using errcode = 'RP003', hint = 'Declare the zone that its values are meant in, such as zone => ''UTC''.';
      end if;
      v_zone_used := v_zone_used or v_column.base <> 'timestamptz'::regtype;
    end if;

    if v_column.role in ('stamp', 'consumed stamp') then
      if v_column.base not in ('timestamptz'::regtype, 'timestamp'::regtype, 'date'::regtype) then
        raise exception '% column %.% has type %', v_column.role, v_name, quote_ident(v_column.name), v_column.type
          using errcode = 'RP003', hint = 'A stamp is a timestamp with or without time zone, or a date.';
      elsif v_column.base <> 'timestamptz'::regtype then
        v_zone_used := v_zone_used or policy.stamp_zone is null;
        v_stamp_zone_used := true;
        if policy.zone is null and policy.stamp_zone is null then
          raise exception '% column %.% has type %, which says no time zone', v_column.role, v_name, quote_ident(v_column.name), v_column.type
            using errcode = 'RP003', hint = 'Declare the zone that it is written in, such as stamp_zone => ''UTC''.';
        end if;
      else
        v_stamp := format('%s column %s.%I has type %s', v_column.role, v_name, v_column.name, v_column.type);
      end if;
      if policy.status_column is null and v_column.attnotnull then
        raise exception '% column %.% is NOT NULL, so no row is held', v_column.role, v_name, quote_ident(v_column.name)
          using errcode = 'RP003', hint = 'Without a status column, held means that the stamp is NULL.';
      end if;
    end if;

    if v_column.role in ('status', 'stamp', 'consumed stamp', 'restored deadline', 'set') then
      if v_column.attgenerated <> '' then
        raise exception '% column %.% is generated and cannot be written', v_column.role, v_name, quote_ident(v_column.name)
          using errcode = 'RP003', hint = 'Name the column that it is generated from.';
      elsif v_column.attidentity = 'a' then
        raise exception '% column %.% is an identity column', v_column.role, v_name, quote_ident(v_column.name) using errcode = 'RP003';
      elsif class.relkind = 'v' and not pg_column_is_updatable(class.oid, v_column.attnum, false) then
        raise exception '% column %.% cannot be updated through the view', v_column.role, v_name, quote_ident(v_column.name)
          using errcode = 'RP003', hint = 'Let the view show the table''s own column, not an expression.';
      elsif not has_column_privilege(class.oid, v_column.attnum, 'UPDATE') then
        raise exception 'role % may not update column %.%', quote_ident(current_user), v_name, quote_ident(v_column.name)
          using errcode = 'RP003', hint = format('grant update (%I) on %s to %I', v_column.name, v_name, current_user);
      end if;
    end if;

    if v_column.role = 'set' then
      if policy.restore_within is not null and v_column.name = policy.deadline_column then
        raise exception 'set clears the deadline, without which nobody knows how long a hold may be restored'
          using errcode = 'RP003', hint = 'Leave it out of set, or leave out restore_within.';
      elsif v_column.name = policy.consumed_stamp_column then
        raise exception 'set names the column %, which says when a hold was consumed', quote_ident(v_column.name)
          using errcode = 'RP003', hint = 'Leave it out of set.';
      elsif v_column.name in (policy.status_column, policy.stamp_column) then
        raise exception 'set names the column %, which the transition writes already', quote_ident(v_column.name)
          using errcode = 'RP003', hint = 'Leave it out of set.';
      elsif policy.set_values ->> v_column.name is not null then
        perform pgreaper._canonical(class.oid, v_column.name, policy.set_values ->> v_column.name, _check_columns.search_path);
      elsif v_column.attnotnull then
        raise exception 'set would make the NOT NULL column %.% null', v_name, quote_ident(v_column.name) using errcode = 'RP003';
      end if;
    end if;
  end loop;

  if policy.zone is not null and not v_zone_used then
    raise exception 'zone % is of no use: the columns of % say their own', quote_literal(policy.zone), v_name
      using errcode = 'RP003', hint = 'Leave out zone.';
  elsif policy.consumed_stamp_column in (policy.stamp_column, policy.deadline_column, policy.status_column) then
    raise exception 'column % cannot be the stamp of consumed holds as well', quote_ident(policy.consumed_stamp_column)
      using errcode = 'RP003', hint = 'Name a column of its own, or leave out consumed_stamp_column.';
  elsif policy.stamp_zone is not null and not v_stamp_zone_used and v_stamp is not null then
    raise exception '%, which needs no zone', v_stamp
      using errcode = 'RP003', hint = 'Leave out stamp_zone.';
  elsif policy.stamp_zone is not null and not v_stamp_zone_used then
    raise exception 'stamp_zone % is of no use: policy % has no stamp column', quote_literal(policy.stamp_zone), quote_ident(policy.name)
      using errcode = 'RP003', hint = 'Leave out stamp_zone.';
  end if;
end;
$function$;

comment on function pgreaper._check_columns(pg_catalog.pg_class, pgreaper.policies, text) is
'RP003 unless the columns of a policy exist, have types that serve, and can be written.';

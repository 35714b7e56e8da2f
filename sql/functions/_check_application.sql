-- _check_application: the states that the application's side of the race writes, as the column's type spells them.
--
-- Raises
--   RP003  the type does not take one, or it contradicts the others.
create function pgreaper._check_application(
  relation regclass,
  policy pgreaper.policies,
  consumed text,
  restored text,
  search_path text
)
returns pgreaper.policies
language plpgsql
volatile
security invoker
as $function$
declare
  v_policy pgreaper.policies := policy;
begin
  if _check_application.consumed is not null then
    v_policy.consumed := pgreaper._canonical(_check_application.relation, policy.status_column, _check_application.consumed,
      _check_application.search_path);
    if v_policy.consumed = any (policy.held) or v_policy.consumed = policy.expired then
      raise exception 'state % is both consumed and %', quote_literal(v_policy.consumed),
        case when v_policy.consumed = policy.expired then 'expired' else 'held' end
        using errcode = 'RP003', hint = 'A consumed hold is neither: nobody else may get it, and it never expires.';
    end if;
  elsif policy.consumed_stamp_column is not null then
    raise exception 'policy % stamps consumed holds and does not say which state they have', quote_ident(policy.name)
      using errcode = 'RP003', hint = 'Say consumed => ''…'', or leave out consumed_stamp_column.';
  end if;

  if _check_application.restored is not null then
    if policy.restore_within is null then
      raise exception 'restored is of no use: policy % does not allow restoring', quote_ident(policy.name)
        using errcode = 'RP003', hint = 'Give restore_within => ''…'' as well, or leave it out.';
    end if;
    v_policy.restored := pgreaper._canonical(_check_application.relation, policy.status_column, _check_application.restored,
      _check_application.search_path);
    if v_policy.restored <> all (policy.held) then
      raise exception 'state % of a restored hold is not a held one', quote_literal(v_policy.restored)
        using errcode = 'RP003', hint = 'Held are ' || array_to_string(policy.held, ', ') || '.';
    end if;
  elsif policy.restore_within is not null then
    if cardinality(policy.held) > 1 then
      raise exception 'policy % does not say which of its held states a restored hold gets', quote_ident(policy.name)
        using errcode = 'RP003', hint = format('Say restored => %L, or another of them.', policy.held[1]);
    end if;
    v_policy.restored := policy.held[1];
  end if;

  return v_policy;
end;
$function$;

comment on function pgreaper._check_application(regclass, pgreaper.policies, text, text, text) is
'A policy with the states that the application writes; RP003 when one does not fit.';

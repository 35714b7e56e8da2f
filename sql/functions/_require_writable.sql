-- _require_writable: refuse to work where the guard cannot hold.
--
-- Under repeatable read a locked row is judged by an old snapshot, and SKIP
-- LOCKED raises 40001 instead of skipping.  A read-only node cannot work at all.
-- The application's own side waits for its row instead and may ask for `any_level`.
--
-- Raises
--   RP004  the transaction is not READ COMMITTED, or it is read-only.
create function pgreaper._require_writable(any_level boolean default false)
returns void
language plpgsql
stable
security invoker
as $function$
begin
  if not _require_writable.any_level and current_setting('transaction_isolation') <> 'read committed' then
    raise exception 'pgreaper works under READ COMMITTED, not %', upper(current_setting('transaction_isolation'))
      using errcode = 'RP004',
            hint = 'Begin the transaction with ISOLATION LEVEL READ COMMITTED, or change default_transaction_isolation of the role.';
  end if;

  if current_setting('transaction_read_only') = 'on' then
    raise exception 'this node or transaction is read-only'
      using errcode = 'RP004',
            detail = case when pg_is_in_recovery() then 'The server is a standby.' else 'transaction_read_only is on.' end,
            hint = 'Connect to the primary, or clear default_transaction_read_only.';
  end if;
end;
$function$;

comment on function pgreaper._require_writable(boolean) is 'RP004 unless the transaction is READ COMMITTED and may write.';

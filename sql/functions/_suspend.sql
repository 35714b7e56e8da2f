-- _suspend: holds failed alike and none succeeded: is it them, or the policy?
--
-- A CHECK that forgot the new status or a broken trigger fails every hold, and the holds
-- are innocent; so they are when a trigger vetoes all (`sqlstate` NULL).  So the first
-- time nobody is charged and the policy rests; it is then tried with other holds.  If one of those succeeded since, the guilty are these holds
-- after all.  If not, the policy rests longer and longer, and goes on by itself when the
-- cause is gone.
--
-- Promises
--   * True: the policy is suspended, charge nobody.  False: charge the holds.
create function pgreaper._suspend(
  policy pgreaper.policies,
  clock timestamptz,
  sqlstate text,
  holds integer
)
returns boolean
language plpgsql
volatile
security invoker
as $function$
declare
  c_same constant integer := 8;
  c_proof constant interval := '1 minute';
  c_longest constant interval := '5 minutes';
  v_cursor pgreaper.cursors;
  v_success timestamptz;
  v_before integer;
begin
  select c.* into v_cursor from pgreaper.cursors as c where c.policy_id = policy.policy_id for update;
  select t.at into v_success
    from pgreaper.transitions as t where t.policy_id = policy.policy_id order by t.at desc limit 1;

  if v_success > v_cursor.failing_at then
    -- A success since: these holds it is.  Only this once, so that the next wave is judged anew.
    update pgreaper.cursors as c
       set failing_at = null, suspended_until = null, suspensions = 0, failing_sqlstate = null
     where c.policy_id = policy.policy_id;
    if _suspend.clock < v_cursor.suspended_until + c_proof then
      return false;
    end if;
    v_cursor.failing_at := null;
    v_cursor.suspensions := 0;
  end if;

  if v_cursor.failing_at is null and _suspend.holds < c_same then
    select count(*) into v_before
      from (
        select from pgreaper.failures as f
         where f.policy_id = policy.policy_id
           and f.sqlstate is not distinct from _suspend.sqlstate
           and f.error_class = pgreaper._error_class(_suspend.sqlstate)
           and f.failed_at > coalesce(v_success, '-infinity')
         limit c_same
      ) as f;
    if v_before + _suspend.holds < c_same then
      return false;
    end if;
  end if;

  update pgreaper.cursors as c
     set position = null,
         failing_at = _suspend.clock,
         failing_sqlstate = _suspend.sqlstate,
         suspensions = least(v_cursor.suspensions + 1, 30),
         suspended_until = _suspend.clock
           + least(c_longest, interval '1 second' * 2 ^ least(v_cursor.suspensions, 20)) * (1 + random() / 4)
   where c.policy_id = policy.policy_id;
  if v_cursor.failing_at is null then
    insert into pgreaper.events (policy_id, kind, at, error_class, sqlstate)
    values (policy.policy_id, 'suspend', _suspend.clock, pgreaper._error_class(_suspend.sqlstate), _suspend.sqlstate);
  end if;

  return true;
end;
$function$;

comment on function pgreaper._suspend(pgreaper.policies, timestamptz, text, integer) is
'Whether holds that fail alike are innocent; if so the policy is suspended.';

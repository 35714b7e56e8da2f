-- reaper_unregister: withdraw a policy.
--
-- Nothing is claimed any more and the policy is no longer listed.  Its books stay and
-- `history` still answers for it; registering the same name again takes it up.  Its relays stay as
-- well and deliver what has happened.
--
-- Raises
--   RP002  no such policy.
--   55006  it has active leases; pause it and wait, or let them lapse.
create function pgreaper.reaper_unregister(policy text)
returns void
language plpgsql
volatile
security invoker
set search_path = pg_catalog, pg_temp
as $function$
declare
  v_policy constant pgreaper.policies := pgreaper._policy(reaper_unregister.policy);
  v_now constant timestamptz := pgreaper._clock();
  v_active integer;
begin
  -- In the order of reaper_register() and reaper_expire(): policy, claims, cursor.  With the
  -- cursor in hand no claim can come in.
  perform from pgreaper.policies as p where p.policy_id = v_policy.policy_id for update;
  perform from pgreaper.claims as c where c.policy_id = v_policy.policy_id and c.finished_at is null order by c.token for update;
  perform from pgreaper.cursors as c where c.policy_id = v_policy.policy_id for update;
  select count(*) into v_active
    from pgreaper.claims as c
   where c.policy_id = v_policy.policy_id and c.finished_at is null and c.claim_until > v_now;
  if v_active > 0 then
    raise object_in_use
      using message = format('policy %I has %s active lease(s)', v_policy.name, v_active),
            hint = 'Pause it with reaper_pause() and withdraw it when pgreaper.leases is empty.';
  end if;

  update pgreaper.claims as c
     set finished_at = v_now, ending = 'released', keys = null, deadlines = null, hints = null
   where c.policy_id = v_policy.policy_id and c.finished_at is null;
  update pgreaper.policies as p set unregistered_at = v_now where p.policy_id = v_policy.policy_id;
  insert into pgreaper.events (policy_id, kind, at, actor)
  values (v_policy.policy_id, 'unregister', v_now, session_user);
end;
$function$;

comment on function pgreaper.reaper_unregister(text) is 'Withdraw a policy; its books stay.';

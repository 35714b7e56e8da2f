-- _rights: what each kind of role may do with the objects of pgreaper: the one list.
--
-- Every public function has a line, those for nobody but the owner too (no kind), and a test
-- refuses one that has none.  `_*` are all helpers: they run as their caller, so to call one
-- gives nobody a right that he does not have.  A new kind is one more word in these lines.
create function pgreaper._rights()
returns table (kind text, object text, name text, privilege text, columns text[])
language sql
immutable
security invoker
set search_path = pg_catalog, pg_temp
as $function$
  select k.kind, r.object, r.name, r.privilege, r.columns::text[]
    from (values
      ('schema', 'pgreaper', 'usage', null, '{reader,worker,operator,registrar,application}'),

      ('routine', '_*', 'execute', null, '{reader,worker,operator,registrar,application}'),
      ('routine', 'reaper_version', 'execute', null, '{reader,worker,operator,registrar,application}'),
      ('routine', 'reaper_history', 'execute', null, '{reader,worker,operator,registrar}'),
      ('routine', 'reaper_preview', 'execute', null, '{worker,operator,registrar}'),
      ('routine', 'reaper_claim', 'execute', null, '{worker,operator}'),
      ('routine', 'reaper_claim_batch', 'execute', null, '{worker,operator}'),
      ('routine', 'reaper_expire', 'execute', null, '{worker,operator}'),
      ('routine', 'reaper_expire_batch', 'execute', null, '{worker,operator}'),
      ('routine', 'reaper_expire_keys', 'execute', null, '{worker,operator}'),
      ('routine', 'reaper_fail', 'execute', null, '{worker,operator}'),
      ('routine', 'reaper_renew', 'execute', null, '{worker,operator}'),
      ('routine', 'reaper_release', 'execute', null, '{worker,operator}'),
      ('routine', 'reaper_sweep', 'execute', null, '{worker,operator}'),
      ('routine', 'reaper_next_due', 'execute', null, '{worker,operator}'),
      ('routine', 'reaper_relay', 'execute', null, '{worker,operator}'),
      ('routine', 'reaper_fetch', 'execute', null, '{worker,operator}'),
      ('routine', 'reaper_ack', 'execute', null, '{worker,operator}'),
      ('routine', 'reaper_keep', 'execute', null, '{worker,operator}'),
      ('routine', 'reaper_resend', 'execute', null, '{operator}'),
      ('routine', 'reaper_unrelay', 'execute', null, '{operator}'),
      ('routine', 'reaper_replay', 'execute', null, '{operator}'),
      ('routine', 'reaper_discard', 'execute', null, '{operator}'),
      ('routine', 'reaper_pause', 'execute', null, '{operator}'),
      ('routine', 'reaper_resume', 'execute', null, '{operator}'),
      ('routine', 'reaper_prune', 'execute', null, '{operator}'),
      ('routine', 'reaper_verify', 'execute', null, '{operator}'),
      ('routine', 'reaper_register', 'execute', null, '{registrar}'),
      ('routine', 'reaper_unregister', 'execute', null, '{registrar}'),
      ('routine', 'reaper_grant', 'execute', null, '{registrar}'),
      ('routine', 'reaper_revoke', 'execute', null, '{}'),
      ('routine', 'reaper_consume', 'execute', null, '{application}'),
      ('routine', 'reaper_extend', 'execute', null, '{application}'),
      ('routine', 'reaper_restore', 'execute', null, '{application}'),

      -- Functions behind the views run as the reader, so he reads the books as well.
      ('table', 'policies', 'select', null, '{reader,worker,operator,registrar,application}'),
      ('table', 'cursors', 'select', null, '{reader,worker,operator,registrar}'),
      ('table', 'claims', 'select', null, '{reader,worker,operator,registrar}'),
      ('table', 'transitions', 'select', null, '{reader,worker,operator,registrar}'),
      ('table', 'failures', 'select', null, '{reader,worker,operator,registrar}'),
      ('table', 'events', 'select', null, '{reader,worker,operator,registrar}'),
      ('table', 'totals', 'select', null, '{reader,worker,operator,registrar}'),
      ('table', 'relays', 'select', null, '{reader,worker,operator,registrar}'),
      ('table', 'deliveries', 'select', null, '{reader,worker,operator,registrar}'),
      ('table', 'undelivered', 'select', null, '{reader,worker,operator,registrar}'),
      ('table', 'grants', 'select', null, '{operator,registrar}'),
      ('table', 'schema_version', 'select', null, '{reader,worker,operator,registrar}'),
      ('table', 'status', 'select', null, '{reader,worker,operator,registrar}'),
      ('table', 'backlog', 'select', null, '{reader,worker,operator,registrar}'),
      ('table', 'activity', 'select', null, '{reader,worker,operator,registrar}'),
      ('table', 'metrics', 'select', null, '{reader,worker,operator,registrar}'),
      ('table', 'leases', 'select', null, '{reader,worker,operator,registrar}'),
      ('table', 'retries', 'select', null, '{reader,worker,operator,registrar}'),
      ('table', 'dead_letters', 'select', null, '{reader,worker,operator,registrar}'),
      ('table', 'history', 'select', null, '{reader,worker,operator,registrar}'),
      ('table', 'relay_status', 'select', null, '{reader,worker,operator,registrar}'),
      ('table', 'dead_events', 'select', null, '{reader,worker,operator,registrar}'),

      -- Identity columns ask for no right on their sequence.
      ('table', 'cursors', 'update', null, '{worker,operator}'),
      ('table', 'claims', 'insert', null, '{worker,operator}'),
      ('table', 'claims', 'update', null, '{worker,operator}'),
      ('table', 'transitions', 'insert', null, '{worker,operator}'),
      ('table', 'failures', 'insert', null, '{worker,operator}'),
      ('table', 'failures', 'update', null, '{worker,operator}'),
      ('table', 'failures', 'delete', null, '{worker,operator}'),
      ('table', 'events', 'insert', null, '{worker,operator,registrar}'),
      -- A restored hold; who, why and when.
      ('table', 'events', 'insert', '{policy_id,key,deadline,kind,state,at,actor,reason}', '{application}'),
      ('table', 'totals', 'insert', null, '{worker,operator}'),
      ('table', 'totals', 'update', null, '{worker,operator}'),

      ('table', 'relays', 'insert', null, '{worker,operator}'),
      ('table', 'relays', 'update', null, '{worker,operator}'),
      ('table', 'deliveries', 'insert', null, '{worker,operator}'),
      ('table', 'deliveries', 'update', null, '{worker,operator}'),
      ('table', 'deliveries', 'delete', null, '{worker,operator}'),
      ('table', 'undelivered', 'insert', null, '{worker,operator}'),
      ('table', 'undelivered', 'update', null, '{worker,operator}'),
      ('table', 'undelivered', 'delete', null, '{worker,operator}'),
      -- How far the trail's ids have been given out.
      ('sequence', 'transitions_transition_id_seq', 'select', null, '{worker,operator}'),
      ('table', 'relays', 'delete', null, '{operator}'),

      ('table', 'policies', 'update', '{paused_at,pause_reason}', '{operator}'),
      ('table', 'claims', 'delete', null, '{operator}'),
      ('table', 'transitions', 'update', '{state}', '{operator}'),
      ('table', 'transitions', 'delete', null, '{operator}'),
      ('table', 'events', 'update', '{reason}', '{operator}'),
      ('table', 'events', 'delete', null, '{operator}'),

      -- Whose table it is, the trigger of `policies` asks.
      ('table', 'policies', 'insert', null, '{registrar}'),
      ('table', 'policies', 'update', '{deadline_column,status_column,held,expired,stamp_column,consumed,consumed_stamp_column,'
        'restored,restore_within,set_values,zone,stamp_zone,grace,'
        'payload_columns,lease,batch,max_attempts,permanent_attempts,backoff_base,backoff_cap,rate_limit,max_claims,owner,'
        'objective,unregistered_at}', '{registrar}'),
      ('sequence', 'policies_policy_id_seq', 'usage', null, '{registrar}'),
      ('table', 'cursors', 'insert', null, '{registrar}'),
      ('table', 'cursors', 'update', '{position}', '{registrar}'),
      ('table', 'claims', 'update', '{finished_at,ending,keys,deadlines,hints}', '{registrar}')
    ) as r (object, name, privilege, columns, kinds)
    left join lateral unnest(r.kinds::text[]) as k (kind) on true;
$function$;

comment on function pgreaper._rights() is 'What each kind of role may do with the objects of pgreaper; kind NULL: for the owner only.';

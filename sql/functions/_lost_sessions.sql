-- _lost_sessions: claims bound to a session that is gone, not yet marked as such or marked long enough.
--
-- A worker that was killed takes its backend with it.  A claim that was made on a direct
-- connection is therefore given up soon after its backend is gone, and not only when its
-- lease ends; the seconds between let a worker that merely reconnects renew it.
create function pgreaper._lost_sessions(policy_id integer, clock timestamptz)
returns table (token uuid, lost_at timestamptz)
language sql
stable
security invoker
as $function$
  select c.token, c.session_lost_at
    from pgreaper.claims as c
   where c.policy_id = _lost_sessions.policy_id
     and c.finished_at is null
     and c.session_pid is not null
     and (c.session_lost_at is null or c.session_lost_at <= _lost_sessions.clock - interval '5 seconds')
     and not exists (
       select from pg_catalog.pg_stat_get_activity(c.session_pid) as a
        where a.backend_start is null or a.backend_start = c.session_start);
$function$;

comment on function pgreaper._lost_sessions(integer, timestamptz) is
'Claims whose session is gone: newly, or for five seconds.';

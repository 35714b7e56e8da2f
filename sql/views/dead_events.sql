-- dead_events: events that were given up, and the command that tries them again.
create view pgreaper.dead_events as
select r.name as relay,
       p.name as policy,
       p.owner,
       pgreaper._event_name(u.event) as event,
       u.key,
       u.deadline,
       u.expired_at,
       u.attempts,
       u.first_failed_at,
       u.failed_at as died_at,
       u.error_class,
       format('pgreaper relays resend %s --event %s', pgreaper._shell_quoted(r.name), pgreaper._event_name(u.event)) as replay_command
  from pgreaper.undelivered as u
  join pgreaper.relays as r on r.relay_id = u.relay_id
  join pgreaper.policies as p on p.policy_id = r.policy_id
 where u.not_before = 'infinity';

comment on view pgreaper.dead_events is 'Events that a queue would not have: why, since when, whose they are, and how to try them again.';
comment on column pgreaper.dead_events.relay is 'Name of the relay.';
comment on column pgreaper.dead_events.policy is 'The policy.';
comment on column pgreaper.dead_events.owner is 'Who looks after it.';
comment on column pgreaper.dead_events.event is 'The event, as reaper_resend() takes it.';
comment on column pgreaper.dead_events.key is 'The hold that expired.';
comment on column pgreaper.dead_events.deadline is 'Its deadline before the transition.';
comment on column pgreaper.dead_events.expired_at is 'When it expired.';
comment on column pgreaper.dead_events.attempts is 'How often the queue refused it.';
comment on column pgreaper.dead_events.first_failed_at is 'When it was refused first.';
comment on column pgreaper.dead_events.died_at is 'When it was given up.';
comment on column pgreaper.dead_events.error_class is 'Kind of the last refusal.';
comment on column pgreaper.dead_events.replay_command is 'Tries it again; can be pasted into a shell.';

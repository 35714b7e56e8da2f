-- dead_letters: holds that were given up, and the command that tries them again.
create view pgreaper.dead_letters as
select p.name as policy,
       f.key,
       p.owner,
       f.deadline,
       f.attempts,
       f.first_seen_at,
       f.failed_at as died_at,
       f.error_class,
       f.sqlstate,
       f.constraint_name,
       format('pgreaper dead replay %s --key %s', pgreaper._shell_quoted(p.name), pgreaper._shell_quoted(f.key)) as replay_command
  from pgreaper.failures as f
  join pgreaper.policies as p on p.policy_id = f.policy_id
 where f.not_before = 'infinity'
   and f.discarded_at is null
   and p.unregistered_at is null;

comment on view pgreaper.dead_letters is 'Holds that were given up: why, since when, whose they are, and how to try them again.';
comment on column pgreaper.dead_letters.policy is 'Name of the policy.';
comment on column pgreaper.dead_letters.key is 'The hold.';
comment on column pgreaper.dead_letters.owner is 'Who looks after it.';
comment on column pgreaper.dead_letters.deadline is 'Its deadline.';
comment on column pgreaper.dead_letters.attempts is 'How often it was tried.';
comment on column pgreaper.dead_letters.first_seen_at is 'When it failed first.';
comment on column pgreaper.dead_letters.died_at is 'When it was given up.';
comment on column pgreaper.dead_letters.error_class is 'Kind of the last failure.';
comment on column pgreaper.dead_letters.sqlstate is 'SQLSTATE of the last failure, when it came from the database.';
comment on column pgreaper.dead_letters.constraint_name is 'Constraint that refused the transition, if one did.';
comment on column pgreaper.dead_letters.replay_command is 'Gives it a fresh budget; can be pasted into a shell.';

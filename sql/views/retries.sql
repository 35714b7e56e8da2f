-- retries: holds that failed and will be tried again.
create view pgreaper.retries as
select p.name as policy,
       f.key,
       f.deadline,
       f.attempts,
       f.first_seen_at,
       f.failed_at,
       f.not_before,
       f.error_class,
       f.sqlstate,
       f.constraint_name
  from pgreaper.failures as f
  join pgreaper.policies as p on p.policy_id = f.policy_id
 where f.not_before < 'infinity'
   and p.unregistered_at is null;

comment on view pgreaper.retries is 'Holds that failed and wait for their next attempt.';
comment on column pgreaper.retries.policy is 'Name of the policy.';
comment on column pgreaper.retries.key is 'The hold.';
comment on column pgreaper.retries.deadline is 'Its deadline.';
comment on column pgreaper.retries.attempts is 'How often it was tried.';
comment on column pgreaper.retries.first_seen_at is 'When it failed first.';
comment on column pgreaper.retries.failed_at is 'When it failed last.';
comment on column pgreaper.retries.not_before is 'When it is tried again.';
comment on column pgreaper.retries.error_class is 'Kind of the last failure.';
comment on column pgreaper.retries.sqlstate is 'SQLSTATE of the last failure, when it came from the database.';
comment on column pgreaper.retries.constraint_name is 'Constraint that refused the transition, if one did.';

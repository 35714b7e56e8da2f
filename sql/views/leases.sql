-- leases: who works on what now.
create view pgreaper.leases as
select p.name as policy,
       c.token,
       c.worker,
       c.holds,
       c.attempt,
       c.claimed_at,
       c.claim_until,
       c.claim_until <= clock_timestamp() as lapsed
  from pgreaper.claims as c
  join pgreaper.policies as p on p.policy_id = c.policy_id
 where c.finished_at is null;

comment on view pgreaper.leases is 'Active claims; a lapsed one is taken back by the next claim or sweep of its policy.';
comment on column pgreaper.leases.policy is 'Name of the policy.';
comment on column pgreaper.leases.token is 'The lease.';
comment on column pgreaper.leases.worker is 'Who has it, as it calls itself.';
comment on column pgreaper.leases.holds is 'How many holds are leased.';
comment on column pgreaper.leases.attempt is 'Which attempt this is for its holds.';
comment on column pgreaper.leases.claimed_at is 'Since when.';
comment on column pgreaper.leases.claim_until is 'Until when.';
comment on column pgreaper.leases.lapsed is 'Whether the lease has run out.';

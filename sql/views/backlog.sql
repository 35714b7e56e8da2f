-- backlog: due holds by the age of their deadline.
create view pgreaper.backlog as
select p.name as policy,
       b.age,
       b."position",
       b.due,
       b.capped
  from pgreaper.policies as p
 cross join lateral pgreaper._backlog(p) as b
 where p.unregistered_at is null;

comment on view pgreaper.backlog is 'Due holds by the age of their deadline: those under no living lease that have not failed, as in the view status.';
comment on column pgreaper.backlog.policy is 'Name of the policy.';
comment on column pgreaper.backlog.age is 'How long they have been due.';
comment on column pgreaper.backlog."position" is 'Order of the ages; 1 is the youngest.';
comment on column pgreaper.backlog.due is 'How many; at most 10000.';
comment on column pgreaper.backlog.capped is 'Whether there are more than that.';

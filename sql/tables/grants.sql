-- grants: which role was given the rights of which kind.
--
-- So that an upgrade gives a role what new functions need, and so that it can be told
-- which role has yet to be given its rights on a target that was registered since.
create table pgreaper.grants (
  role text not null,
  kind text not null,
  granted_at timestamptz not null,
  granted_by text not null,
  primary key (role, kind)
);

comment on table pgreaper.grants is 'Which role was given the rights of which kind; written by reaper_grant().';
comment on column pgreaper.grants.role is 'Name of the role.';
comment on column pgreaper.grants.kind is 'worker, operator, reader, registrar or application.';
comment on column pgreaper.grants.granted_at is 'When it was given them first.';
comment on column pgreaper.grants.granted_by is 'Who gave them.';

-- The schema that holds everything of pgreaper's.  Whoever loads this file may
-- have created it already, because the version table lives there too.
create schema if not exists pgreaper;

comment on schema pgreaper is
'Expires overdue holds in your own tables: leases, one guarded transition, retries, dead letters, a trail.';

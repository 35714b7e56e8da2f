-- Nobody gets anything by default.  A function that is created, also one that a later
-- revision creates anew, is executable by PUBLIC until this has run; so it runs last.
revoke all on schema pgreaper from public;
revoke all on all tables in schema pgreaper from public;
revoke all on all sequences in schema pgreaper from public;
revoke all on all routines in schema pgreaper from public;

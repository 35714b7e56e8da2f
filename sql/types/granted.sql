-- granted: a statement that gives or takes a right, and whether it was carried out.
create type pgreaper.granted as (
  statement text,
  done boolean
);

comment on type pgreaper.granted is 'A GRANT or REVOKE, and whether it was carried out; if not, somebody else has to.';

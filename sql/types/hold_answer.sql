-- hold_answer: what the application is told of one hold, by reaper_consume, reaper_extend and reaper_restore.
create type pgreaper.hold_answer as (
  key text,
  outcome text,
  state text,
  deadline timestamptz,
  constraint_name text
);

comment on type pgreaper.hold_answer is
'What the application asked for, or why not: the state and deadline found (state NULL: no such hold), and a constraint that refused.';

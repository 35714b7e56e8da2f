-- hold_outcome: what became of one hold.
create type pgreaper.hold_outcome as (
  key text,
  outcome text,
  state text
);

comment on type pgreaper.hold_outcome is
'What became of a hold: expired, already-done, not-eligible, locked, retry or dead-letter, and the state found.';

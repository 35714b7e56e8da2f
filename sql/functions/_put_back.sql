-- _put_back: let claims see again what is due from that deadline on.
--
-- Counted as a move also when the cursor stands further back already: a claim that
-- waits for the cursor read the target before, and would go past what is given back.
create function pgreaper._put_back(policy_id integer, deadline timestamptz)
returns void
language sql
volatile
security invoker
as $function$
  update pgreaper.cursors as c
     set position = case when c.position > _put_back.deadline then _put_back.deadline else c.position end,
         moves = c.moves + 1
   where c.policy_id = _put_back.policy_id;
$function$;

comment on function pgreaper._put_back(integer, timestamptz) is 'Move the forward cursor back to a deadline, never forward.';

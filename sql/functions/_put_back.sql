-- _put_back: let claims see again what is due from that deadline on.
create function pgreaper._put_back(policy_id integer, deadline timestamptz)
returns void
language sql
volatile
security invoker
as $function$
  update pgreaper.cursors as c
     set position = _put_back.deadline
   where c.policy_id = _put_back.policy_id
     and c.position > _put_back.deadline;
$function$;

comment on function pgreaper._put_back(integer, timestamptz) is 'Move the forward cursor back to a deadline, never forward.';

-- _trail_writers: the transactions that may be about to commit a row of the trail, as pg_locks names them.
--
-- Who appends to the trail locks the table before it takes an id, and until its commit is visible.  So an id that was
-- given out before this call is by now visible for ever, gone for ever, or one of these transactions has it.
-- Other transactions, however old, do not count; nor does the caller's own, which sees its rows.
--
-- A session that prepares its transaction hands the lock to one called -1/xid.  Ids that a session keeps in
-- store (a sequence with a cache) may come at any time: then there is always a writer.
create function pgreaper._trail_writers()
returns text[]
language sql
volatile
security invoker
as $function$
  select array(
    select distinct l.virtualtransaction
      from pg_catalog.pg_locks as l
     where l.locktype = 'relation'
       and l.database = (select d.oid from pg_catalog.pg_database as d where d.datname = current_database())
       and l.relation = 'pgreaper.transitions'::regclass
       and l.mode = 'RowExclusiveLock'
       and l.granted
       and l.pid is distinct from pg_backend_pid()
    union all
    select 'cache' from pg_catalog.pg_sequence as s
     where s.seqrelid = 'pgreaper.transitions_transition_id_seq'::regclass and s.seqcache > 1
  );
$function$;

comment on function pgreaper._trail_writers() is 'The transactions that may be about to commit a row of the trail.';

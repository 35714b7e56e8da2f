-- Operators on types of the user's: an exact match before the server's polymorphic or coerced one.
do $shadow$
declare
  v record;
begin
  for v in
    select o.name, l.type as l, r.type as r, row_number() over () as n
      from unnest('{=,<>,<,<=,>,>=}'::text[]) as o (name)
     cross join unnest('{mood,short_text,word,varchar,char(4)}'::text[]) as l (type)
     cross join unnest('{mood,short_text,word,varchar,char(4),text}'::text[]) as r (type)
     where l.type = r.type or r.type = 'text'
  loop
    execute format('create function hostile.own_%s(%s, %s) returns boolean language plpgsql as %L', v.n, v.l, v.r,
      format('begin perform hostile.spring(%L); end', v.name || ' of ' || v.l));
    begin
      execute format('create operator hostile.%s (leftarg = %s, rightarg = %s, function = hostile.own_%s)', v.name, v.l, v.r, v.n);
    exception
      when duplicate_function then null;
    end;
  end loop;
end
$shadow$;

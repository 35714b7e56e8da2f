-- _shell_quoted: a word that can be pasted into a POSIX shell.
create function pgreaper._shell_quoted(word text)
returns text
language sql
immutable
security invoker
set search_path = pg_catalog, pg_temp
as $function$
  select case when _shell_quoted.word ~ '^[A-Za-z0-9_./:@%+,][A-Za-z0-9_./:@%+=,-]*$' then _shell_quoted.word
              else '''' || replace(_shell_quoted.word, '''', '''"''"''') || '''' end;
$function$;

comment on function pgreaper._shell_quoted(text) is 'A word that can be pasted into a POSIX shell.';

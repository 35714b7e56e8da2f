-- _settings: a policy as (setting, value), for people and for comparing two of them.
create function pgreaper._settings(policy pgreaper.policies)
returns table (setting text, value text)
language sql
stable
security invoker
as $function$
  select s.key, s.value
    from jsonb_each_text(to_jsonb(policy) - '{policy_id,name,registered_at,paused_at,pause_reason}'::text[]) as s;
$function$;

comment on function pgreaper._settings(pgreaper.policies) is 'The settings of a policy as name and value.';

-- Everything of pgreaper's, in the order in which it depends on one another.
--
--   psql --set ON_ERROR_STOP=1 --single-transaction --file sql/install.sql
--
-- is enough to try it out; `pgreaper install` and Alembic run the same files and also
-- record the version.

-- Names in views, defaults and constraints mean the server's own.
set local search_path = pg_catalog, pg_temp;

\ir schema.sql

-- Where this is.
\ir functions/_node.sql

-- Books.
\ir tables/policies.sql
\ir tables/cursors.sql
\ir tables/claims.sql
\ir tables/transitions.sql
\ir tables/failures.sql
\ir tables/events.sql
\ir tables/totals.sql
\ir tables/grants.sql
\ir tables/relays.sql
\ir tables/deliveries.sql
\ir tables/undelivered.sql

-- What functions return.
\ir types/leased_hold.sql
\ir types/leased_batch.sql
\ir types/hold_outcome.sql
\ir types/settled_batch.sql
\ir types/hold_answer.sql
\ir types/command_outcome.sql
\ir types/failure_decision.sql
\ir types/policy_change.sql
\ir types/policy_preview.sql
\ir types/verification.sql
\ir types/granted.sql
\ir types/pruned.sql
\ir types/opened_relay.sql
\ir types/leased_event.sql
\ir types/acknowledged.sql
\ir types/_batch.sql
\ir types/_target.sql
\ir types/_leased.sql
\ir types/_settled.sql
\ir types/_step.sql
\ir types/_hold.sql
\ir types/_named_hold.sql

-- Time, and how late a hold was.
\ir functions/_clock.sql
\ir functions/_lateness_bounds.sql
\ir functions/_negative_lateness_bounds.sql
\ir functions/_lateness.sql
\ir functions/_quantile.sql

-- Counters.
\ir functions/_count.sql
\ir functions/_count_transition.sql
\ir functions/_count_events.sql

-- Policies, and the target as SQL.
\ir functions/_require_writable.sql
\ir functions/_policy.sql
\ir functions/_type_name.sql
\ir functions/_equals.sql
\ir functions/_key_part.sql
\ir functions/_hiding.sql
\ir functions/_target_version.sql
\ir functions/_target.sql
\ir functions/_table_lock.sql
\ir functions/_batch_size.sql
\ir functions/_subscription.sql
\ir functions/_zone.sql
\ir functions/_canonical.sql
\ir functions/_find_key.sql
\ir functions/_check_target.sql
\ir functions/_check_columns.sql
\ir functions/_check_application.sql
\ir functions/_unpublishable.sql
\ir functions/_settings.sql
\ir functions/_own_target.sql
\ir functions/_may_write.sql
\ir functions/reaper_register.sql
\ir functions/reaper_unregister.sql
\ir functions/reaper_pause.sql
\ir functions/reaper_resume.sql

-- What can be taken now.
\ir functions/_due.sql
\ir functions/_retry_at.sql
\ir functions/_retries.sql
\ir functions/_allowance.sql
\ir functions/_counted_at.sql
\ir functions/_portion.sql
\ir functions/_rationed.sql
\ir functions/_suspicion.sql
\ir functions/_moot.sql
\ir functions/_close_moot.sql
\ir functions/_probe.sql

-- What failed, and when it may be tried again.
\ir functions/_error_class.sql
\ir functions/_not_before.sql
\ir functions/_fail.sql
\ir functions/_put_back.sql
\ir functions/_suspend.sql
\ir functions/_lost_sessions.sql
\ir functions/_lapsed.sql
\ir functions/_recorded.sql
\ir functions/_take_back.sql

-- The transition.
\ir functions/_lock_strength.sql
\ir functions/_row_lock.sql
\ir functions/_oldest_age.sql
\ir functions/_under_way.sql
\ir functions/_multixacts.sql
\ir functions/_unshared.sql
\ir functions/_unlocked.sql
\ir functions/_write.sql
\ir functions/_held_again.sql
\ir functions/_attempt.sql
\ir functions/_classify.sql
\ir functions/_foreign_cancel.sql
\ir functions/_transition.sql

-- Claim and expire.
\ir functions/_lease.sql
\ir functions/_claim.sql
\ir functions/reaper_claim.sql
\ir functions/reaper_claim_batch.sql
\ir functions/_expire.sql
\ir functions/reaper_expire.sql
\ir functions/reaper_expire_batch.sql
\ir functions/reaper_fail.sql
\ir functions/reaper_renew.sql
\ir functions/reaper_release.sql

-- The application's side of the race.
\ir functions/_application.sql
\ir functions/_lock_hold.sql
\ir functions/_see_hold.sql
\ir functions/_change_hold.sql
\ir functions/reaper_consume.sql
\ir functions/reaper_extend.sql
\ir functions/reaper_restore.sql

-- Sweep.
\ir functions/_taken.sql
\ir functions/_spend.sql
\ir functions/_outlasted.sql
\ir functions/_sweep_step.sql
\ir functions/reaper_sweep.sql

-- Commands from outside.
\ir functions/_is_key.sql
\ir functions/_named_holds.sql
\ir functions/reaper_expire_keys.sql

-- Dead letters.
\ir functions/reaper_replay.sql
\ir functions/reaper_discard.sql
\ir functions/_shell_quoted.sql
\ir views/dead_letters.sql
\ir views/retries.sql

-- Events out.
\ir functions/_event_name.sql
\ir functions/_event_number.sql
\ir functions/_spans.sql
\ir functions/_relay.sql
\ir functions/_leased_events.sql
\ir functions/_trail_writers.sql
\ir functions/_last_transition.sql
\ir functions/_begun_anew.sql
\ir functions/_gaps.sql
\ir functions/_free_events.sql
\ir functions/_next_events.sql
\ir functions/_has_events.sql
\ir functions/_refuse_events.sql
\ir functions/_promote.sql
\ir functions/_payloads.sql
\ir functions/reaper_relay.sql
\ir functions/reaper_unrelay.sql
\ir functions/reaper_fetch.sql
\ir functions/reaper_ack.sql
\ir functions/reaper_keep.sql
\ir functions/reaper_resend.sql
\ir functions/_relay_status.sql
\ir views/relay_status.sql
\ir views/dead_events.sql

-- Seeing it.
\ir views/history.sql
\ir functions/reaper_history.sql
\ir functions/_unleased.sql
\ir functions/reaper_preview.sql
\ir functions/_look.sql
\ir functions/reaper_next_due.sql
\ir functions/_agenda.sql
\ir functions/_status.sql
\ir functions/_backlog.sql
\ir views/status.sql
\ir views/leases.sql
\ir views/backlog.sql
\ir views/metrics.sql
\ir views/activity.sql
\ir functions/reaper_verify.sql
\ir functions/reaper_prune.sql
\ir functions/reaper_version.sql

-- Who may do what.
\ir functions/_rights.sql
\ir functions/_target_rights.sql
\ir functions/_missing_rights.sql
\ir functions/_grant_again.sql
\ir functions/_kept_rights.sql
\ir functions/reaper_grant.sql
\ir functions/reaper_revoke.sql
\ir rights.sql

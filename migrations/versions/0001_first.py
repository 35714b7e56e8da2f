"""
The tables, types, functions and views of pgreaper 0.1.
"""

from alembic.operations import Operations

from pgreaper import schema

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

FILES: tuple[str, ...] = (
    "schema.sql",
    "functions/_node.sql",
    "tables/policies.sql",
    "tables/cursors.sql",
    "tables/claims.sql",
    "tables/transitions.sql",
    "tables/failures.sql",
    "tables/events.sql",
    "tables/totals.sql",
    "tables/grants.sql",
    "tables/relays.sql",
    "tables/deliveries.sql",
    "tables/undelivered.sql",
    "types/leased_hold.sql",
    "types/leased_batch.sql",
    "types/hold_outcome.sql",
    "types/settled_batch.sql",
    "types/hold_answer.sql",
    "types/command_outcome.sql",
    "types/failure_decision.sql",
    "types/policy_change.sql",
    "types/policy_preview.sql",
    "types/verification.sql",
    "types/granted.sql",
    "types/pruned.sql",
    "types/opened_relay.sql",
    "types/leased_event.sql",
    "types/acknowledged.sql",
    "types/_batch.sql",
    "types/_target.sql",
    "types/_leased.sql",
    "types/_settled.sql",
    "types/_step.sql",
    "types/_hold.sql",
    "types/_named_hold.sql",
    "functions/_clock.sql",
    "functions/_lateness_bounds.sql",
    "functions/_negative_lateness_bounds.sql",
    "functions/_lateness.sql",
    "functions/_quantile.sql",
    "functions/_count.sql",
    "functions/_count_transition.sql",
    "functions/_count_events.sql",
    "functions/_require_writable.sql",
    "functions/_policy.sql",
    "functions/_type_name.sql",
    "functions/_equals.sql",
    "functions/_key_part.sql",
    "functions/_hiding.sql",
    "functions/_target_version.sql",
    "functions/_target.sql",
    "functions/_table_lock.sql",
    "functions/_batch_size.sql",
    "functions/_subscription.sql",
    "functions/_zone.sql",
    "functions/_canonical.sql",
    "functions/_find_key.sql",
    "functions/_check_target.sql",
    "functions/_check_columns.sql",
    "functions/_check_application.sql",
    "functions/_unpublishable.sql",
    "functions/_settings.sql",
    "functions/_own_target.sql",
    "functions/_may_write.sql",
    "functions/reaper_register.sql",
    "functions/reaper_unregister.sql",
    "functions/reaper_pause.sql",
    "functions/reaper_resume.sql",
    "functions/_due.sql",
    "functions/_retry_at.sql",
    "functions/_retries.sql",
    "functions/_allowance.sql",
    "functions/_counted_at.sql",
    "functions/_portion.sql",
    "functions/_rationed.sql",
    "functions/_suspicion.sql",
    "functions/_moot.sql",
    "functions/_close_moot.sql",
    "functions/_probe.sql",
    "functions/_error_class.sql",
    "functions/_not_before.sql",
    "functions/_fail.sql",
    "functions/_put_back.sql",
    "functions/_suspend.sql",
    "functions/_lost_sessions.sql",
    "functions/_lapsed.sql",
    "functions/_recorded.sql",
    "functions/_take_back.sql",
    "functions/_lock_strength.sql",
    "functions/_row_lock.sql",
    "functions/_oldest_age.sql",
    "functions/_under_way.sql",
    "functions/_multixacts.sql",
    "functions/_unshared.sql",
    "functions/_unlocked.sql",
    "functions/_write.sql",
    "functions/_held_again.sql",
    "functions/_attempt.sql",
    "functions/_classify.sql",
    "functions/_foreign_cancel.sql",
    "functions/_transition.sql",
    "functions/_lease.sql",
    "functions/_claim.sql",
    "functions/reaper_claim.sql",
    "functions/reaper_claim_batch.sql",
    "functions/_expire.sql",
    "functions/reaper_expire.sql",
    "functions/reaper_expire_batch.sql",
    "functions/reaper_fail.sql",
    "functions/reaper_renew.sql",
    "functions/reaper_release.sql",
    "functions/_application.sql",
    "functions/_lock_hold.sql",
    "functions/_see_hold.sql",
    "functions/_change_hold.sql",
    "functions/reaper_consume.sql",
    "functions/reaper_extend.sql",
    "functions/reaper_restore.sql",
    "functions/_taken.sql",
    "functions/_spend.sql",
    "functions/_outlasted.sql",
    "functions/_sweep_step.sql",
    "functions/reaper_sweep.sql",
    "functions/_is_key.sql",
    "functions/_named_holds.sql",
    "functions/reaper_expire_keys.sql",
    "functions/reaper_replay.sql",
    "functions/reaper_discard.sql",
    "functions/_shell_quoted.sql",
    "views/dead_letters.sql",
    "views/retries.sql",
    "functions/_event_name.sql",
    "functions/_event_number.sql",
    "functions/_spans.sql",
    "functions/_relay.sql",
    "functions/_leased_events.sql",
    "functions/_trail_writers.sql",
    "functions/_last_transition.sql",
    "functions/_begun_anew.sql",
    "functions/_gaps.sql",
    "functions/_free_events.sql",
    "functions/_next_events.sql",
    "functions/_has_events.sql",
    "functions/_refuse_events.sql",
    "functions/_promote.sql",
    "functions/_payloads.sql",
    "functions/reaper_relay.sql",
    "functions/reaper_unrelay.sql",
    "functions/reaper_fetch.sql",
    "functions/reaper_ack.sql",
    "functions/reaper_keep.sql",
    "functions/reaper_resend.sql",
    "functions/_relay_status.sql",
    "views/relay_status.sql",
    "views/dead_events.sql",
    "views/history.sql",
    "functions/reaper_history.sql",
    "functions/_unleased.sql",
    "functions/reaper_preview.sql",
    "functions/_look.sql",
    "functions/reaper_next_due.sql",
    "functions/_agenda.sql",
    "functions/_status.sql",
    "functions/_backlog.sql",
    "views/status.sql",
    "views/leases.sql",
    "views/backlog.sql",
    "views/metrics.sql",
    "views/activity.sql",
    "functions/reaper_verify.sql",
    "functions/reaper_prune.sql",
    "functions/reaper_version.sql",
    "functions/_rights.sql",
    "functions/_target_rights.sql",
    "functions/_missing_rights.sql",
    "functions/_grant_again.sql",
    "functions/_kept_rights.sql",
    "functions/reaper_grant.sql",
    "functions/reaper_revoke.sql",
    "rights.sql",
)

# Dead letters and active leases are work that only these tables know of.  The
# locks keep a worker from leasing more between this look and the drop.
UNFINISHED = """\
do $unfinished$
declare
  v_dead bigint;
  v_leases bigint;
begin
  lock table pgreaper.claims, pgreaper.failures in access exclusive mode;

  select count(*) into v_dead from pgreaper.failures as f where f.not_before = 'infinity' and f.discarded_at is null;
  select count(*) into v_leases from pgreaper.claims as c where c.finished_at is null;

  if v_dead + v_leases > 0 then
    raise exception 'pgreaper has unfinished work: % dead letters, % active leases', v_dead, v_leases
      using errcode = 'object_in_use',
            hint = 'Nothing was changed. Let the workers finish and settle the dead letters, '
                   'or use --force: what they say is lost.';
  end if;
end
$unfinished$;
"""


def upgrade(op: Operations) -> None:
    schema.apply(op, revision, FILES)


def downgrade(op: Operations) -> None:
    if not op.get_context().opts.get(schema.FORCE):
        schema.execute(op, UNFINISHED)
    schema.drop(op, revision, FILES)

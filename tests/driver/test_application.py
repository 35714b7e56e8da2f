"""The application's side through the driver: consume, extend, restore."""

from datetime import UTC, datetime, timedelta

import psycopg
import pytest

from pgreaper import Reaper
from pgreaper.errors import DatabaseBusy, InvalidInput, UnknownPolicy

FAR = datetime(2100, 1, 1, tzinfo=UTC)


@pytest.fixture
def reaper(connect, holds):
    """One hold, due in an hour."""
    holds.ahead(1)
    holds.register(consumed="consumed", restore_within="1 hour")
    return Reaper(connect())


def test_answers(reaper, db):
    """Key, outcome, state and the deadline as a datetime; `done` tells whether the hold is as it was asked for."""
    extended = reaper.extend("holds", "01", FAR)
    assert (extended.key, extended.outcome, extended.state, extended.deadline) == ("1", "extended", "held", FAR)
    assert extended.done
    again = reaper.extend("holds", "1", FAR - timedelta(days=1))
    assert (again.outcome, again.deadline, again.done) == ("already-done", FAR, True)
    db.execute("update holds set status = 'expired', expires_at = now()")
    assert reaper.restore("holds", "1", FAR, reason="r").outcome == "restored"
    assert [entry.outcome for entry in reaper.history("holds", "1")] == ["restore"]
    assert [reaper.consume("holds", "1").outcome for _ in range(2)] == ["consumed", "already-done"]
    late = reaper.extend("holds", "1", FAR)
    assert (late.outcome, late.state, late.done) == ("not-eligible", "consumed", False)
    assert reaper.consume("holds", "2").state is None


def test_for_ever(reaper, db):
    """`datetime.max`, as which infinity arrives, is infinity on its way back."""
    assert reaper.extend("holds", "1", datetime.max.replace(tzinfo=UTC)).deadline == datetime.max.replace(tzinfo=UTC)
    assert db.execute("select expires_at = 'infinity' from holds").fetchone() == (True,)


def test_under_other_settings(reaper, connect):
    """A deadline means the same whatever the session is set to."""
    odd = Reaper(connect(options="-c timezone=Asia/Tokyo -c datestyle=German"))
    assert odd.extend("holds", "1", FAR).deadline == FAR


def test_misuse(reaper, connect, db):
    """Refused with pgreaper's own errors."""
    with pytest.raises(InvalidInput, match="has no time zone"):
        reaper.extend("holds", "1", datetime(2100, 1, 1))  # noqa: DTZ001  that is the point
    with pytest.raises(InvalidInput, match="later than now"):
        reaper.extend("holds", "1", datetime.now(UTC) - timedelta(seconds=1))
    with pytest.raises(UnknownPolicy):
        reaper.consume("nope", "1")
    other = connect(autocommit=False)
    other.execute("select from holds for update")
    with pytest.raises(DatabaseBusy):
        Reaper(connect(options="-c lock_timeout=50ms")).consume("holds", "1")
    other.rollback()


def test_it_belongs_to_the_callers_transaction(reaper, connect, holds):
    """What the caller rolls back was not consumed."""
    connection = connect(autocommit=False)
    assert Reaper(connection).consume("holds", "1").outcome == "consumed"
    assert connection.info.transaction_status is psycopg.pq.TransactionStatus.INTRANS
    connection.rollback()
    assert holds.states() == {1: "held"}


def test_the_policy_says_it(reaper):
    """What was registered comes back."""
    (policy,) = reaper.policies()
    assert (policy.consumed, policy.consumed_stamp_column, policy.restored, policy.restore_within) == (
        "consumed", None, "held", timedelta(hours=1)
    )  # fmt: skip

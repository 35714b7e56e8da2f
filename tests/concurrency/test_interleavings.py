"""All interleavings of two sessions' steps keep the invariants; and a planted fault does not go unnoticed."""

from collections.abc import Iterator

import pytest

from tests.concurrency import interleave
from tests.concurrency.faults import FAULTS, Fault
from tests.concurrency.interleave import Play, Violation, interleavings
from tests.concurrency.sessions import Connect, Connection
from tests.conftest import Holds

SCENARIOS = {
    "two workers": ("claim expire", "claim expire"),
    "two workers, one in a transaction": ("begin claim commit expire", "claim expire"),
    "two workers, in transactions": ("begin claim expire commit", "begin claim commit"),
    "a worker rolls back": ("begin claim expire rollback", "claim expire"),
    "a worker rolls back its expire": ("claim begin expire rollback expire", "rescan expire"),
    "consumed": ("claim expire", "begin consume commit"),
    "consumed, undone": ("claim expire", "begin consume rollback"),
    "extended": ("claim expire", "begin extend commit"),
    "extended, undone": ("begin claim expire commit", "begin extend rollback"),
    "deleted": ("claim expire", "begin delete commit"),
    "re-keyed": ("claim expire", "begin rekey commit"),
    "re-keyed, undone": ("claim expire", "begin rekey rollback"),
    "touched": ("claim begin expire commit", "begin touch commit"),
    "held again": ("claim expire claim expire", "begin rehold commit"),
    "consumed and held again": ("claim expire", "begin consume rehold commit"),
    "locked": ("claim expire rescan expire", "begin lock commit"),
    "released": ("claim release claim expire", "claim expire"),
    "released in a transaction": ("claim begin release commit", "claim expire"),
    "release undone": ("claim begin release rollback expire", "claim expire"),
    "a worker dies": ("claim", "lapse claim lapse claim expire"),
    "expire and claim in one transaction": ("claim lapse begin expire claim commit expire", "claim expire"),
    "late expire": ("claim lapse expire", "claim expire"),
    "late expire in a transaction": ("claim lapse begin expire commit", "claim expire"),
    "take-over in a transaction": ("claim lapse expire", "begin claim commit expire"),
    "take-over undone": ("claim lapse expire", "begin claim rollback"),
    "late renew": ("claim lapse renew expire", "begin claim commit"),
    "late release": ("claim lapse release", "begin claim commit expire"),
    "swept": ("sweep", "begin claim expire commit"),
    "swept twice": ("sweep sweep", "sweep lapse sweep"),
    "swept while consumed": ("sweep", "begin consume commit"),
    "swept while extended": ("sweep", "begin extend rollback"),
    "swept while leases lapse": ("claim lapse expire", "sweep lapse sweep"),
    "swept while released": ("claim lapse begin release commit", "sweep"),
}

# What an application does to a hold.
APPLICATION = {"consume", "extend", "delete", "rekey", "touch", "rehold", "lock"}
UNWATCHED = Fault("a trigger counts", "_target", "not v_class.watched", "true")


@pytest.fixture
def play(db: Connection, holds: Holds, connect: Connect) -> Iterator[Play]:
    holds.register(lease="1 minute", max_attempts=100)
    play = interleave.set_up(db, connect)
    yield play
    interleave.close(play)


@pytest.fixture
def straight(db: Connection, play: Play) -> Play:
    """A play in which the reaper does not lock first, as on a table without triggers: the witness's does not count."""
    UNWATCHED.plant(db)
    return play


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_all_interleavings(play: Play, scenario: str):
    """In whatever order: no hold is expired twice, early, unguarded or without its trail, and none is lost."""
    left, right = SCENARIOS[scenario]
    assert len(play.run_all(left, right)) >= 4


@pytest.mark.parametrize(
    "scenario", [name for name, (_, right) in SCENARIOS.items() if APPLICATION & set(right.split())]
)
def test_all_interleavings_where_nothing_is_locked_first(straight: Play, scenario: str):
    """The same where the update goes straight to the rows: what the application does meanwhile decides."""
    assert len(straight.run_all(*SCENARIOS[scenario])) >= 2


def test_interleavings_are_complete():
    """The runner plays each order that keeps the scripts' own order, once."""
    assert sorted(interleavings(2, 2)) == ["LLRR", "LRLR", "LRRL", "RLLR", "RLRL", "RRLL"]
    assert len(set(interleavings(4, 5))) == 126


@pytest.mark.parametrize(
    ("rule", "scenario"),
    [
        ("guard: held", "consumed"),
        ("guard: due", "extended"),
        ("skip locked", "consumed"),
        ("trail", "two workers"),
        ("token", "late expire"),
        ("lease locked", "take-over in a transaction"),
        ("cursor locked", "two workers, one in a transaction"),
        ("read again", "two workers, one in a transaction"),
        ("leased left out", "two workers"),
        ("take back", "a worker dies"),
        ("take back ends the claim", "late expire"),
        ("take back skips", "expire and claim in one transaction"),
    ],
)
def test_planted_fault_is_noticed(play: Play, db: Connection, rule: str, scenario: str):
    """The harness is worth something: it turns red when a rule is broken."""
    FAULTS[rule].plant(db)
    with pytest.raises(Violation):
        play.run_all(*SCENARIOS[scenario])


def test_a_lock_that_goes_unseen_is_noticed(straight: Play, db: Connection):
    """The harness sees it when rows that somebody has locked are taken for free ones."""
    Fault("locked", "_unlocked", "h.xmax operator(pg_catalog.=) ''0''", "true").plant(db)
    with pytest.raises(Violation):
        straight.run_all(*SCENARIOS["locked"])

"""Whatever workers, an application and people do, in whatever order: the database does what the model says."""

from __future__ import annotations

from typing import TYPE_CHECKING

import psycopg
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.concurrency.faults import FAULTS, Fault
from tests.property.machine import Reaping, Shop

if TYPE_CHECKING:
    from tests.concurrency.sessions import Connect

BOUNDS = settings(
    max_examples=30,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    database=None,
    print_blob=False,
    report_multiple_bugs=False,
    suppress_health_check=list(HealthCheck),
)
# The quick ones of those that it finds: the guards take it up to 15 seconds each, and others plant them too.
PLANTED = [
    FAULTS["token"],
    FAULTS["leased left out"],
    FAULTS["take back"],
    FAULTS["trail"],
    Fault("incarnation", "_due", "else 'x.deadline operator(pg_catalog.=) s.deadline' end", "else 'true' end"),
    Fault("a crash is an attempt", "_take_back", "'LeaseExpired')", "'LeaseExpired', charged => false)"),
    Fault("attempts never go down", "_fail", "least(f.attempts, 2147483647 - v_attempt) + v_attempt", "1"),
]


@pytest.fixture
def machine(connect: Connect) -> type[Reaping]:
    class Machine(Reaping):
        shop = Shop(connect)

    return Machine


def test_the_database_keeps_the_contract(machine: type[Reaping]):
    """Thirty stories of forty steps on four connections; the invariants are checked after each step."""
    run_state_machine_as_test(machine, settings=BOUNDS)


@pytest.mark.parametrize("fault", PLANTED, ids=lambda fault: fault.rule)
def test_a_planted_fault_is_found(machine: type[Reaping], fault: Fault):
    """A harness that does not notice is no harness."""
    fault.plant(machine.shop.judge)
    with pytest.raises((AssertionError, pytest.fail.Exception, psycopg.Error)):
        run_state_machine_as_test(machine, settings=settings(BOUNDS, max_examples=30, phases=[Phase.generate]))

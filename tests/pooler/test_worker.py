"""
The worker's own tests once more, all of them through PgBouncer.

Harder than life: a server connection serves one transaction, and the next one finds another backend.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

import pytest

from tests.driver.test_worker import *  # noqa: F403
from tests.driver.test_worker import trail

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.pooler.conftest import Pooler

# The application in it sets its session, which has no meaning here.
del test_c016_a_role_that_defaults_to_repeatable_read  # noqa: F821
# Below is what becomes of it here.
del test_c013_a_claim_whose_reply_is_lost_is_given_back  # noqa: F821


@pytest.fixture
def pooler(new_pooler: Callable[..., Pooler]) -> Pooler:
    return new_pooler(server_lifetime="0")


def test_c013_a_claim_whose_reply_is_lost_comes_back(db, holds, work, proxy, set_clock):
    """
    The claim was committed, the token never arrived, and it is bound to no session by which the worker knows it.

    Its lease lapses, and a later run takes its holds over, charged as an attempt.
    """
    holds.due(10)
    holds.register(batch=5)
    proxy.drop_reply("reaper_claim", after=0)

    run, _ = work(url=proxy.url)
    assert (run.expired, run.exit_code) == (5, 0)

    for minutes in (30, 60, 90):  # taken back, tried again after its backoff
        set_clock(timedelta(minutes=minutes))
        assert work()[0].exit_code == 0
    assert set(holds.states().values()) == {"expired"}
    assert len(trail(db)) == 10

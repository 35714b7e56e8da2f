"""
The worker's own tests once more, all of them through PgBouncer.

Harder than life: a server connection serves one transaction, and the next one finds another backend.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.driver.test_worker import *  # noqa: F403

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.pooler.conftest import Pooler

# The application in it sets its session, which has no meaning here.
del test_c016_a_role_that_defaults_to_repeatable_read  # noqa: F821


@pytest.fixture
def pooler(new_pooler: Callable[..., Pooler]) -> Pooler:
    return new_pooler(server_lifetime="0")

"""
The driver's own tests once more, all of them through PgBouncer.

All transactions share one server connection; where a test keeps a transaction open beside another, two.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.driver.test_api import *  # noqa: F403

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.pooler.conftest import Pooler

TWO_AT_ONCE = {"test_a_lock_that_does_not_come_is_the_environments", "test_errors_have_a_class_each"}


@pytest.fixture
def pooler(new_pooler: Callable[..., Pooler], request: pytest.FixtureRequest) -> Pooler:
    return new_pooler(default_pool_size="2" if request.node.originalname in TWO_AT_ONCE else "1")

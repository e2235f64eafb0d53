"""Fixtures of the store's tests."""

import pytest

from tests.store.driver import Driver, make_spec


@pytest.fixture
def driver() -> Driver:
    """Groups of 2 samples, 2 groups a step, 4 active, staleness at most 1, strict order."""
    return Driver(make_spec())

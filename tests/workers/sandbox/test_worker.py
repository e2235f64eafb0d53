"""What is heard of a fence's keeper, by a worker whose own loop is late."""

import asyncio
import json
import socket
from collections.abc import Iterator
from contextlib import closing
from typing import Any, cast

import pytest

from penstock.workers.sandbox.execution import Limits
from penstock.workers.sandbox.sandbox_worker import FenceWorker, UsageMeter

WELL = {"status": 0, "in_time": True, "cpu_s": 0.1, "seconds": 0.2}
UNUSED: Any = None


@pytest.fixture
def ends() -> Iterator[tuple[FenceWorker, socket.socket]]:
    """A worker without a fence, and the keeper's end of its connection."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    with closing(ours), closing(theirs):
        yield FenceWorker(UNUSED, ours, Limits()), theirs


def test_what_was_said_in_time_counts_though_it_is_heard_after_the_deadline(
    ends: tuple[FenceWorker, socket.socket],
) -> None:
    worker, keeper = ends
    keeper.send(json.dumps(WELL).encode())
    assert asyncio.run(worker.ended(0.0, cast(UsageMeter, UNUSED))) == (WELL, False)


def test_a_keeper_that_says_nothing_is_late(ends: tuple[FenceWorker, socket.socket]) -> None:
    with pytest.raises(TimeoutError):
        asyncio.run(ends[0].ended(0.0, cast(UsageMeter, UNUSED)))


def test_a_keeper_that_has_ended_is_lost(ends: tuple[FenceWorker, socket.socket]) -> None:
    ends[1].close()
    with pytest.raises(ConnectionError):
        asyncio.run(ends[0].ended(0.0, cast(UsageMeter, UNUSED)))

"""What a session and a server compute alike."""

import asyncio
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.conf.errors import DataError, NotStarted
from penstock.orchestrator.loops.verbs import LoopThread, check_name, merge_outputs, shares_of
from penstock.workers.protocols import ForwardOutput

WAIT_S = 60.0


@given(st.lists(st.integers(1, 50), max_size=9), st.sampled_from([(1, 1), (3, 1), (4, 2)]))
def test_what_ranks_answer_for_their_shares_is_put_in_order(lengths: list[int], ranks: tuple[int, int]) -> None:
    shares = shares_of(lengths, *ranks)
    assert len(shares) == ranks[0]
    assert all(shares[first] == shares[first + ranks[1] - 1] for first in range(0, ranks[0], ranks[1]))
    outputs = [ForwardOutput([np.full(lengths[i], i, np.float32) for i in share], {"loss": 2.0}) for share in shares]
    whole = merge_outputs(shares, outputs)
    assert whole.metrics == {"loss": 2.0}
    assert [(len(values), values[0]) for values in whole.logprobs] == [(n, i) for i, n in enumerate(lengths)]


@pytest.mark.parametrize("name", ["", "a/b", "..", "x" * 129, "a b"])
def test_what_is_no_plain_word_is_no_name(name: str) -> None:
    with pytest.raises(DataError, match="must be a name"):
        check_name(name)


def test_cancelling_a_call_ends_it_and_closing_ends_all() -> None:
    thread, ended = LoopThread("test"), threading.Semaphore(0)

    async def forever() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.release()

    async def here() -> int:
        return 5

    first, second = thread.submit(forever()), thread.submit(forever())
    assert thread.submit(here()).result(WAIT_S) == 5
    first.cancel()
    assert ended.acquire(timeout=WAIT_S)
    thread.close()
    assert ended.acquire(timeout=WAIT_S)
    assert second.cancelled()
    with pytest.raises(NotStarted):
        thread.submit(here())

"""What an engine is asked when numbers of threads are tried."""

import asyncio
from collections.abc import Sequence

import pytest

from penstock.workers.protocols import Completion, Sampling
from penstock.workers.rollout.metered import MOST_SAMPLES, NUM_TOKENS, NUM_TRIES, seconds_per_token
from tests.virtual_time import run_virtually


class PlayedEngine:
    """A group takes 8 virtual seconds on one thread, and 8 / n on n; they are decoded together."""

    def __init__(self) -> None:
        self.num_threads, self.calls = 0, 0

    async def use_threads(self, num_threads: int) -> None:
        self.num_threads = num_threads

    async def generate(self, prompt_ids: Sequence[int], num_samples: int, sampling: Sampling) -> list[Completion]:
        self.calls += 1
        await asyncio.sleep(8 / self.num_threads)
        tokens = [0] * sampling.max_tokens
        return [Completion(tokens, [0.0] * len(tokens), [0] * len(tokens), "", "length")] * num_samples


@pytest.mark.parametrize(("num_groups", "together"), [(4, 4), (1, 1), (0, 1), (1000, MOST_SAMPLES // 8)])
def test_a_token_takes_its_share_of_the_time_of_those_that_are_decoded_together(num_groups: int, together: int) -> None:
    engine = PlayedEngine()
    found = run_virtually(seconds_per_token(engine, [1, 2], num_groups, 8, None))
    assert engine.calls == 2 * NUM_TRIES * together
    assert found[1] == pytest.approx(2 * found[2])
    assert found[2] * together * 8 * NUM_TOKENS == pytest.approx(4)

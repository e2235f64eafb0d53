"""The time that vLLM's CPU engine takes for a token, by the threads that it computes with. Measured before the first
step, where engines and ranks run at the same time; `orchestrator/cluster/placement/threads.py` divides the threads.
"""

import asyncio
from collections.abc import Sequence
from typing import Protocol

from penstock.workers.protocols import Completion, Sampling

NUM_TOKENS = 16
"""Decode steps of a try."""
NUM_TRIES = 3
"""Number of tries, of which the shortest counts: first ones are slower, and so is one that something else has
disturbed."""
MOST_SAMPLES = 256
"""Most samples that are decoded together."""


class ThreadedEngine(Protocol):
    """An engine whose threads can be changed while it serves: vLLM's, on a CPU."""

    async def generate(self, prompt_ids: Sequence[int], num_samples: int, sampling: Sampling) -> list[Completion]: ...

    async def use_threads(self, num_threads: int) -> None: ...


async def seconds_per_token(
    engine: ThreadedEngine, counts: Sequence[int], num_groups: int, group_size: int, seed: int | None
) -> dict[int, float]:
    """Seconds for a token, by threads, where so many groups of samples are decoded together. `seed`: None where samples
    have none."""
    num_groups = max(1, min(num_groups, MOST_SAMPLES // group_size))
    sampling = Sampling(max_tokens=NUM_TOKENS, ignore_eos=True, seed=seed)
    found = {}
    for count in counts:
        await engine.use_threads(count)
        found[count] = min([await _per_token(engine, num_groups, group_size, sampling) for _ in range(NUM_TRIES)])
    return found


async def _per_token(engine: ThreadedEngine, num_groups: int, group_size: int, sampling: Sampling) -> float:
    """Seconds for a token in one try. The prompts are token 0, which every model has."""
    clock = asyncio.get_running_loop().time
    started = clock()
    groups = await asyncio.gather(*(engine.generate([0], group_size, sampling) for _ in range(num_groups)))
    return (clock() - started) / sum(len(sample.token_ids) for group in groups for sample in group)

"""The time that a rank takes for a token, by the threads that it computes with. Measured before the first step, where
engines and ranks run at the same time on CPUs; `orchestrator/cluster/placement/threads.py` divides the threads.
"""

import time
from collections.abc import Sequence

import torch

from penstock.store.data.rows import Rows
from penstock.workers.trainer.trainer import PolicyTrainer

NUM_ROWS, NUM_TOKENS = 8, 127
"""Numbers of rows and of tokens in each for the trial: about a thousand tokens, one micro-batch."""
NUM_TRIES = 3
"""Number of tries, of which the shortest counts: first ones are slower, and so is one that something else has
disturbed."""
FORWARDS = 3
"""Forward passes that an update is worth: a backward pass has twice the products of a forward one."""


def use_threads(num_threads: int) -> None:
    """Have the calling thread compute with this number of threads; 0 leaves it."""
    if num_threads:
        torch.set_num_threads(num_threads)


def seconds_per_token(trainer: PolicyTrainer, counts: Sequence[int]) -> dict[int, float]:
    """Seconds of an update for a token, by number of threads. Collective; changes nothing that is trained."""
    rows = _rows(trainer.max_length or NUM_TOKENS + 1)
    num_tokens = int(rows.lengths("response_ids").sum()) + len(rows)
    found = {}
    for count in counts:
        use_threads(count)
        found[count] = FORWARDS * min(_seconds(trainer, rows) for _ in range(NUM_TRIES)) / num_tokens
    return found


def _seconds(trainer: PolicyTrainer, rows: Rows) -> float:
    started = time.perf_counter()
    trainer.logprobs(rows)
    return time.perf_counter() - started


def _rows(max_length: int) -> Rows:
    """Rows for the trial. They consist of token 0, which every model has."""
    response = [0] * min(NUM_TOKENS, max_length - 1)
    return Rows.from_lists({"prompt_ids": [[0]] * NUM_ROWS, "response_ids": [response] * NUM_ROWS})

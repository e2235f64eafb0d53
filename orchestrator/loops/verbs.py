"""The verbs of a loop of one's own, the same in a session (`session.py`) and on a server (`client.py`):

    samples = policy.sample(prompt_ids, num_samples=8)                    # from the weights published last
    output = policy.forward_backward(data, "importance_sampling")         # gradients add up
    policy.optim_step(AdamParams(learning_rate=1e-5))                     # weights change, gradients are cleared
    policy.publish()                                                      # samples come from these weights now
    path = policy.save("step-10")                                         # weights, optimizer and its counters
    policy.load(path)

And what both sides share: seeds, names, which rank has which datum, and the thread that runs calls for synchronous
callers.
"""

import asyncio
import concurrent.futures
import hashlib
import re
import threading
from abc import ABC, abstractmethod
from collections.abc import Coroutine, Sequence
from concurrent.futures import Future
from typing import Any, TypedDict, TypeVar, Unpack

import numpy as np

from penstock.conf.errors import DataError, NotStarted
from penstock.store.ledger.batches import balance, row_cost
from penstock.workers.protocols import AdamParams, Datum, ForwardOutput, LossCall, SampleOutput, Sampling
from penstock.workers.runtime.async_tasks import cancel_all

T = TypeVar("T")
END_S = 10.0
"""Deadline in seconds for calls that are cancelled at the end."""


class LoopThread:
    """An event loop in a thread of its own, for callers without one. Lifecycle: `submit` from any thread, `close`."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def submit(self, work: Coroutine[Any, Any, T]) -> "Future[T]":
        """Begin. The future's `cancel` cancels the work. Raises `NotStarted` after `close`."""
        if not self._thread.is_alive():
            work.close()
            raise NotStarted("the loop's session or client is over: open another one.")
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def close(self) -> None:
        """Cancel what is under way, and end the thread."""
        if not self._thread.is_alive():
            return

        async def end() -> None:
            await cancel_all(asyncio.all_tasks() - {asyncio.current_task()})

        concurrent.futures.wait([self.submit(end())], END_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(END_S)


NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")


class SampleOptions(TypedDict, total=False):
    """Further arguments of `sample`, as `SampleCall` has them."""

    stop_ids: Sequence[int]
    prompt_logprobs: bool
    topk_prompt_logprobs: int
    target_prompt_ids: np.ndarray | None
    topk_logprobs: int


class LoopPolicy(ABC):
    """A model that is trained and sampled from, call by call. Raises `DataError` for wrong arguments, having changed
    nothing; `DeadlineExceeded` for what takes too long; other `PenstockError`s for what else fails."""

    version: int
    """Number of `publish` calls: the weights that samples come from. 0: those it started with."""

    @abstractmethod
    def forward(self, data: Sequence[Datum], loss: str | LossCall) -> ForwardOutput:
        """Score the data's targets without gradients, at temperature 1. `loss`: a name, or one with its numbers
        (`algorithms/losses/summed.py`)."""

    @abstractmethod
    def forward_backward(self, data: Sequence[Datum], loss: str | LossCall) -> ForwardOutput:
        """Score the data's targets, and add the gradients of the summed loss to those since the last `optim_step`."""

    @abstractmethod
    def optim_step(self, params: AdamParams) -> dict[str, float]:
        """Step by the gradients since the last step, and clear them. Returns `actor/grad_norm`, before clipping,
        `actor/lr` and `actor/skipped_nonfinite`."""

    @abstractmethod
    def publish(self) -> int:
        """Have samples come from the present weights from now on. Samples asked for before come from those before.
        Returns the new version."""

    def sample(
        self, prompt_ids: Sequence[int], num_samples: int = 1, sampling: Sampling | None = None,
        **options: Unpack[SampleOptions],
    ) -> SampleOutput:  # fmt: skip
        """Sample from the weights published last: `sample_async`, waited for."""
        return self.sample_async(prompt_ids, num_samples, sampling, **options).result()

    @abstractmethod
    def sample_async(
        self, prompt_ids: Sequence[int], num_samples: int = 1, sampling: Sampling | None = None,
        **options: Unpack[SampleOptions],
    ) -> "Future[SampleOutput]":  # fmt: skip
        """Begin to sample; many calls run side by side. A sampling without a seed gets one made of counters, so the
        same loop draws the same. The future has a deadline, and its `cancel` ends the call."""

    @abstractmethod
    def save(self, name: str) -> str:
        """Save weights, optimizer and its counters under a new name. Returns the path for `load`."""

    @abstractmethod
    def load(self, path: str) -> None:
        """Go on from what `save` has saved. Samples come from it after the next `publish`."""


def loss_call(loss: str | LossCall) -> LossCall:
    return LossCall(loss) if isinstance(loss, str) else loss


def check_name(name: str) -> str:
    """The name of something to be saved. Raises `DataError` for one that is no plain word."""
    if not NAME.fullmatch(name):
        raise DataError(f"{name[:60]!r} must be a name of letters, digits, dots, dashes and underscores.")
    return name


def seed_of(*counters: object) -> int:
    """A seed made of counters, from 0 to 2**31 - 1: the same whenever they are. No random id is among them, so that the
    same loop draws the same in another session."""
    digest = hashlib.sha256("/".join(map(str, counters)).encode()).digest()
    return int.from_bytes(digest[:4], "little") >> 1


def shares_of(lengths: Sequence[int], num_ranks: int, ranks_per_row: int) -> list[list[int]]:
    """Positions of sequences by rank, ascending, balanced by cost; ranks that split the work on a row get the same
    ones. Depends on the lengths alone."""
    shares = balance([row_cost(length) for length in lengths], num_ranks // ranks_per_row)
    return [sorted(share) for share in shares for _ in range(ranks_per_row)]


def merge_outputs(shares: Sequence[Sequence[int]], outputs: Sequence[ForwardOutput]) -> ForwardOutput:
    """The output for all data, of those of the ranks for their shares."""
    logprobs: list[np.ndarray] = [np.zeros(0, np.float32)] * (
        1 + max((max(share) for share in shares if share), default=-1)
    )
    for share, output in zip(shares, outputs, strict=True):
        for position, values in zip(share, output.logprobs, strict=True):
            logprobs[position] = values
    return ForwardOutput(logprobs, dict(outputs[0].metrics))

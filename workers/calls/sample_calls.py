"""The arguments and results of sampling from an adapter, or from the base model: plain data, the same for the server, a
session and the engines.

Legend: P tokens of the prompt, K tokens that are told of at a position.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from penstock.workers.calls.training_calls import AdapterState
from penstock.workers.pictures.placeholders import PromptPictures
from penstock.workers.protocols import Sampling


@dataclass(frozen=True)
class SampleCall:
    """A request for samples."""

    prompt_ids: Sequence[int]
    num_samples: int
    sampling: Sampling
    """With a seed, always: a call that is repeated draws the same samples (with the hf engine, to the bit)."""
    stop_ids: Sequence[int] = ()
    """Tokens that end a sample, besides the model's own."""
    prompt_logprobs: bool = False
    topk_prompt_logprobs: int = 0
    target_prompt_ids: np.ndarray | None = None
    """Tokens whose log-probability after each prompt token is asked for, `[P - 1, K]` int64; -1: none."""
    topk_logprobs: int = 0
    """Most likely tokens to be told at each sampled position, under the sampling distribution."""
    pictures: PromptPictures | None = None


@dataclass(frozen=True)
class TopTokens:
    """The K most likely tokens at each position, best first."""

    token_ids: np.ndarray
    """`[positions, K]` int32."""
    logprobs: np.ndarray
    """`[positions, K]` float32."""


@dataclass(frozen=True)
class SampledTokens:
    token_ids: list[int]
    logprobs: list[float]
    """Under the sampling distribution, natural log."""
    finish_reason: str
    """Reason: stop or length."""
    top: TopTokens | None = None


@dataclass(frozen=True)
class SampleOutput:
    samples: list[SampledTokens]
    prompt_logprobs: np.ndarray | None = None
    """Of each prompt token under the model at temperature 1, `[P]` float32, NaN for the first."""
    top_prompt: TopTokens | None = None
    """At each prompt token, `[P, K]`, under the model at temperature 1; the first row means nothing."""
    target_logprobs: np.ndarray | None = None
    """Of `target_prompt_ids`, of its shape; 0 where it has -1."""


class AdapterEngine(Protocol):
    """An engine that samples from adapters by their names, besides what every `RolloutEngine` does: `generate` goes on
    with the weights that are published."""

    async def add_adapter(self, name: str, state: AdapterState) -> None:
        """Take an adapter, which stays until it is dropped. Does nothing for a name that is there. Raises `DataError`
        for an adapter of layers or of a rank that the engine does not serve, `WorkerDied`."""

    async def drop_adapter(self, name: str) -> None:
        """Forget an adapter; requests in flight end with it. Does nothing where there is none of that name."""

    def adapters(self) -> list[str]:
        """Names of the adapters, in the order in which they came."""

    async def sample(self, adapter: str | None, call: SampleCall) -> SampleOutput:
        """Sample from an adapter; None: from the weights that are published. A cancelled call ends in the engine, too.
        Raises `UnknownAdapter`, `PromptRefused` and other `DataError` for what cannot be served, `WorkerDied`."""

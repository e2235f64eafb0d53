"""The interface between the server and what computes: ranks that train adapters, and engines that sample from them.
`cluster_backend.py` has the real one.

    server ─▶ journal ─▶ schedule ─▶ Backend ─▶ ranks (one call after the other), engines (many side by side)

Adapters are known by names that the server gives them. A name of sampler weights is never given twice.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from penstock.conf.errors import PenstockError
from penstock.workers.pictures.placeholders import PromptPictures
from penstock.workers.protocols import Sampling
from penstock.workers.training_calls import AdamParams, AdapterSpec, AdapterState, Datum, ForwardOutput, LossCall


class TrainerLost(PenstockError):
    """Ranks have died and others are there. No adapter is on them any more: each has to be created again of a state,
    and what was carried out since is to be repeated."""


class RequestFailed(PenstockError):
    """A request has failed by itself, and would fail again: it is answered so, and not repeated. What it had done is
    not known, so its adapter is on no rank any more and has to be created again of a state, without this request."""


@dataclass(frozen=True)
class ModelFacts:
    """The base model, as clients are told of it."""

    name: str
    """Name that clients ask for, e.g. `Qwen/Qwen3-8B`."""
    path: str
    """Directory with its configuration and tokenizer."""
    max_length: int
    """Tokens of the longest sequence."""
    vocabulary: int
    max_rank: int
    """Largest rank of an adapter."""


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
    """Most likely tokens to be told at each sampled position."""
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
    """At each prompt token; the first row means nothing."""
    target_logprobs: np.ndarray | None = None
    """Of `target_prompt_ids`, of its shape; 0 where it has -1."""


class Backend(Protocol):
    """Calls that train run one at a time. They raise `DataError` or `ConfigError` for wrong arguments, having changed
    nothing, `RequestFailed` and `TrainerLost`. A request by which the ranks are lost again and again has to be given up
    by the caller. `sample` may run beside them and many times at once, and hides the deaths of engines; a cancelled one
    stops to cost anything."""

    facts: ModelFacts

    async def create_adapter(self, name: str, spec: AdapterSpec, state: AdapterState | None = None) -> None:
        """Make an adapter, which starts as the base model or goes on from a state."""

    async def drop_adapter(self, name: str) -> None:
        """Forget an adapter. Does nothing where there is none of that name."""

    async def forward(self, name: str, data: Sequence[Datum], loss: LossCall, *, backward: bool) -> ForwardOutput:
        """Score the targets; with `backward` the gradients of the summed loss are added to the adapter's."""

    async def optim_step(self, name: str, params: AdamParams) -> dict[str, float]:
        """Step and clear the gradients. Returns metrics: `grad_norm` before clipping."""

    async def adapter_state(self, name: str) -> AdapterState:
        """The adapter's whole state, as a copy."""

    async def publish(self, sampler: str, state: AdapterState) -> None:
        """Bring weights to the engines, under a name of their own."""

    async def drop_sampler(self, sampler: str) -> None:
        """Forget sampler weights. Does nothing where there are none of that name."""

    async def sample(self, sampler: str | None, call: SampleCall) -> SampleOutput:
        """Sample from published weights; None: from the base model."""

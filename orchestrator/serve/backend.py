"""The interface between the server and what computes: ranks that train adapters, and engines that sample from them.
`actors/` has the real one.

    server ─▶ journal ─▶ schedule ─▶ Backend ─▶ ranks (one call after the other), engines (many side by side)

Adapters are known by names that the server gives them. A name of sampler weights is never given twice.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from penstock.conf.errors import PenstockError
from penstock.workers.sample_calls import SampleCall, SampleOutput
from penstock.workers.training_calls import WHOLE, AdamParams, AdapterSpec, AdapterState, Datum, ForwardOutput, LossCall


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
    """Largest rank of an adapter; `WHOLE`: all weights are trained, by one client."""

    @property
    def is_whole(self) -> bool:
        return self.max_rank == WHOLE


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

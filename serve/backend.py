"""The interface between the server and what computes: ranks that train adapters, and engines that sample from them.
`actors/` has the real one.

    server ─▶ journal ─▶ schedule ─▶ Backend ─▶ ranks (one call after the other), engines (many side by side)

Adapters are known by names that the server gives them. A name of sampler weights is never given twice.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from penstock.conf.errors import PenstockError
from penstock.workers.protocols import (
    WHOLE,
    AdamParams,
    AdapterSpec,
    AdapterState,
    Datum,
    ForwardOutput,
    LossCall,
    SampleCall,
    SampleOutput,
)


class TrainerLost(PenstockError):
    """Ranks have died. `bring_back` starts others, which have no adapter: each has to be created again of a state, and
    what was carried out since is to be repeated."""


class RequestFailed(TrainerLost):
    """A request has failed by itself, and would fail again: it is answered so, and not repeated. The ranks are of no
    use any more, since some may wait for the one that it failed on."""


class DeadlyRequest(PenstockError):
    """Ranks or engines were lost again and again while requests of one tenant were at work. Others are there: it is the
    tenant that is refused."""


class BackendFailed(PenstockError):
    """Ranks or an engine cannot be brought back: the server ends, and its next start goes on."""


@dataclass(frozen=True)
class ModelFacts:
    """The base model, as clients see it."""

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
    nothing, `RequestFailed` and `TrainerLost`, after which `bring_back` is called. `sample` may run beside them and
    many times at once. It hides the deaths of engines, but for `DeadlyRequest` and `BackendFailed`; a cancelled one
    stops to cost anything."""

    facts: ModelFacts
    window_s: float
    """Seconds for which a loss counts, and a tenant is refused after `DeadlyRequest`."""

    async def run(self) -> None:
        """Replace engines that are lost, until cancelled. Raises `BackendFailed`."""

    async def bring_back(self, tenant: str, failure: TrainerLost) -> None:
        """Start other ranks in place of those that were lost while a request of this tenant was at work. Raises
        `DeadlyRequest` once they are there, if there were too many losses of that kind; and `BackendFailed`."""

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

    async def sample(self, sampler: str | None, call: SampleCall, tenant: str) -> SampleOutput:
        """Sample from published weights; None: from the base model. `tenant`: whose request it is."""

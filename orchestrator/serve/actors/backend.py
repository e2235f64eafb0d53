"""The `Backend` (`serve/backend.py`) over ranks and engines on a Ray cluster."""

import asyncio
from collections.abc import Callable, Sequence

from penstock.conf.errors import DataError
from penstock.conf.run import RunConfig
from penstock.orchestrator.cluster.fleet.fleet import Fleet
from penstock.orchestrator.serve.actors.engines import ServedEngines
from penstock.orchestrator.serve.actors.ranks import ServedRanks
from penstock.orchestrator.serve.backend import ModelFacts
from penstock.workers.sample_calls import SampleCall, SampleOutput
from penstock.workers.training_calls import AdamParams, AdapterSpec, AdapterState, Datum, ForwardOutput, LossCall


class ClusterBackend:
    """Lifecycle: over a fleet that has started."""

    def __init__(self, fleet: Fleet, config: RunConfig, facts: ModelFacts, tell: Callable[[str], None]) -> None:
        self.facts = facts
        self.ranks = ServedRanks(fleet, config, tell)
        self.engines = ServedEngines(fleet, config, tell)
        self._turn = asyncio.Lock()
        """Lock of the ranks: they make one call after the other."""

    async def create_adapter(self, name: str, spec: AdapterSpec, state: AdapterState | None = None) -> None:
        if not min(1, self.facts.max_rank) <= spec.rank <= self.facts.max_rank:
            raise DataError(
                f"rank={spec.rank}: adapters have a rank of 1 to {self.facts.max_rank} here. Ask for a smaller one, or "
                "have the server started with a larger serve.max_rank."
            )
        async with self._turn:
            await self.ranks.create(name, spec, state)

    async def drop_adapter(self, name: str) -> None:
        async with self._turn:
            await self.ranks.drop(name)

    async def forward(self, name: str, data: Sequence[Datum], loss: LossCall, *, backward: bool) -> ForwardOutput:
        async with self._turn:
            return await self.ranks.forward(name, data, loss, backward=backward)

    async def optim_step(self, name: str, params: AdamParams) -> dict[str, float]:
        async with self._turn:
            return await self.ranks.step(name, params)

    async def adapter_state(self, name: str) -> AdapterState:
        async with self._turn:
            return await self.ranks.state(name)

    async def publish(self, sampler: str, state: AdapterState) -> None:
        await self.engines.publish(sampler, state.for_sampling())

    async def drop_sampler(self, sampler: str) -> None:
        await self.engines.drop(sampler)

    async def sample(self, sampler: str | None, call: SampleCall) -> SampleOutput:
        return await self.engines.sample(sampler, call)

"""The `Backend` (`serve/backend.py`) over ranks and engines on a Ray cluster."""

import asyncio
from collections.abc import Callable, Sequence

import numpy as np

from penstock.conf.errors import DataError
from penstock.conf.run import RunConfig
from penstock.orchestrator.cluster.fleet.fleet import Fleet
from penstock.orchestrator.serve.actors.engines import ServedEngines
from penstock.orchestrator.serve.actors.ranks import ServedRanks
from penstock.orchestrator.serve.backend import ModelFacts, SampleCall, SampleOutput
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
        if not 1 <= spec.rank <= self.facts.max_rank:
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
        for number, datum in enumerate(data):
            self._check(number, datum)
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

    def _check(self, number: int, datum: Datum) -> None:
        """Raise `DataError` for what would fail on one rank while the others wait for it."""
        length, facts = len(datum.token_ids), self.facts
        if not 1 <= length <= facts.max_length:
            raise DataError(f"data[{number}] has {length} tokens: the model takes 1 to {facts.max_length}.")
        if datum.targets.shape[0] != length:
            raise DataError(
                f"data[{number}]: target_tokens have the shape {list(datum.targets.shape)}, and there are {length} "
                "tokens. Each token has its target, or its row of targets."
            )
        for what, ids in (("a token", datum.token_ids), ("a target", datum.targets)):
            if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < facts.vocabulary:
                raise DataError(f"data[{number}]: {what} is not in the vocabulary of {facts.vocabulary} tokens.")
        for name, values in datum.columns.items():
            if values.shape != datum.targets.shape:
                raise DataError(
                    f"data[{number}]: {name} has the shape {list(values.shape)}, and target_tokens "
                    f"{list(datum.targets.shape)}. Both need the same."
                )
            if not np.isfinite(values).all():
                raise DataError(f"data[{number}]: {name} has a value that is not finite.")

"""The `Backend` (`serve/backend.py`) over ranks and engines on a Ray cluster. Ranks are called together and replaced
together; `engines.py` has the engines.

    call ─▶ every rank, its own share of the data ─▶ answers           a rank is lost ─▶ others start ─▶ `TrainerLost`

What ranks have computed is gone with them. The server creates its adapters again, of snapshots and journals.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from penstock.conf.errors import ConfigError, DataError, PenstockError
from penstock.conf.run import RunConfig
from penstock.orchestrator.cluster.failures import Kind, first_line, kind_of
from penstock.orchestrator.cluster.fleet.fleet import Fleet
from penstock.orchestrator.cluster.ray_calls import answers
from penstock.orchestrator.loops.verbs import put_together, shares_of
from penstock.orchestrator.serve.actors.engines import ServedEngines
from penstock.orchestrator.serve.backend import ModelFacts, RequestFailed, TrainerLost
from penstock.workers.sample_calls import SampleCall, SampleOutput
from penstock.workers.training_calls import AdamParams, AdapterSpec, AdapterState, Datum, ForwardOutput, LossCall


class ClusterBackend:
    """Lifecycle: over a fleet that has started."""

    def __init__(self, fleet: Fleet, config: RunConfig, facts: ModelFacts, tell: Callable[[str], None]) -> None:
        """`tell`: called with what happens to ranks and engines, for people."""
        self.facts, self.engines = facts, ServedEngines(fleet, config, tell)
        self._fleet, self._config, self._tell = fleet, config, tell
        self.num_lost = 0
        """How many times ranks were lost."""
        self._turn = asyncio.Lock()
        """Lock of the ranks: they make one call after the other."""

    async def create_adapter(self, name: str, spec: AdapterSpec, state: AdapterState | None = None) -> None:
        if not min(1, self.facts.max_rank) <= spec.rank <= self.facts.max_rank:
            raise DataError(
                f"rank={spec.rank}: adapters have a rank of 1 to {self.facts.max_rank} here. Ask for a smaller one, or "
                "have the server started with a larger serve.max_rank."
            )
        await self._all("create_adapter", self._same(name, spec, state))

    async def drop_adapter(self, name: str) -> None:
        await self._all("drop_adapter", self._same(name))

    async def forward(self, name: str, data: Sequence[Datum], loss: LossCall, *, backward: bool) -> ForwardOutput:
        """Score the data: each rank its share, balanced by cost. Which share a datum is in depends on this call
        alone."""
        trainer = self._config.trainer
        shares = shares_of([len(datum.token_ids) for datum in data], trainer.num_ranks, trainer.ranks_per_row)
        arguments = [(name, [data[position] for position in share], loss, backward) for share in shares]
        return put_together(shares, await self._all("forward_adapter", arguments))

    async def optim_step(self, name: str, params: AdamParams) -> dict[str, float]:
        return dict((await self._all("step_adapter", self._same(name, params)))[0])

    async def adapter_state(self, name: str) -> AdapterState:
        state: AdapterState = (await self._all("adapter_state", self._same(name)))[0]
        return state

    async def publish(self, sampler: str, state: AdapterState) -> None:
        await self.engines.publish(sampler, state.for_sampling())

    async def drop_sampler(self, sampler: str) -> None:
        await self.engines.drop(sampler)

    async def sample(self, sampler: str | None, call: SampleCall) -> SampleOutput:
        return await self.engines.sample(sampler, call)

    def _same(self, *arguments: Any) -> list[tuple[Any, ...]]:
        return [arguments] * self._config.trainer.num_ranks

    async def _all(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Call every rank with its own arguments. Raises `DataError` and `ConfigError` of theirs, `RequestFailed` for
        what would fail again, and `TrainerLost`."""
        async with self._turn:
            members = self._fleet.role("trainer")
            if len(members) < len(arguments):  # the last replacement failed
                await self._replace("not all ranks are there")
                raise TrainerLost("the ranks were replaced")
            calls = [
                (name, getattr(handle, method).remote(*own))
                for (name, handle), own in zip(members, arguments, strict=True)
            ]
            try:
                return await answers(calls, phase=method, timeout_s=self._config.trainer.step_timeout_s)
            except PenstockError as failure:
                if isinstance(failure, DataError | ConfigError):  # of all ranks alike, which have changed nothing
                    raise
                await self._replace(first_line(failure))  # others may wait for the one that failed
                if kind_of(failure) is Kind.ERROR:
                    raise RequestFailed(str(failure)) from failure
                raise TrainerLost(str(failure)) from failure

    async def _replace(self, why: str) -> None:
        """Start other ranks in place of all. Raises what their start raised: the next call tries again."""
        self.num_lost += 1
        self._tell(f"ranks are replaced: {why}")
        (team,) = self._fleet.teams("trainer")
        self._fleet.remove(team)
        try:
            self._fleet.add(await self._fleet.start_members(team))
        except PenstockError as failure:
            if kind_of(failure) is Kind.ERROR:
                raise
            raise TrainerLost(f"ranks could not be started again: {failure}") from failure

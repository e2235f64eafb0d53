"""The `Backend` (`serve/backend.py`) over ranks and engines on a Ray cluster. Ranks are called and replaced together,
each engine is replaced alone.

    call ─▶ every rank, its own share of the data ─▶ answers           a rank is lost ─▶ others start ─▶ `TrainerLost`
    publish ─▶ every engine         sample ─▶ the engine with the fewest samples under way
                                    it is lost ─▶ another starts and gets the adapters; the call is repeated

What ranks have computed is gone with them: the server creates its adapters again, of snapshots and journals. A sample
that is repeated is the same, as its seed is part of the call.
"""

import asyncio
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import ray

from penstock.conf.errors import ConfigError, DataError, DeadlineExceeded, PenstockError
from penstock.conf.run import RunConfig
from penstock.orchestrator.cluster.failures import Kind, first_line, kind_of
from penstock.orchestrator.cluster.fleet.fleet import Fleet
from penstock.orchestrator.cluster.ray_calls import answers, answers_or_end
from penstock.orchestrator.loops.verbs import put_together, shares_of
from penstock.orchestrator.serve.backend import ModelFacts, RequestFailed, TrainerLost
from penstock.workers.concurrent_tasks import cancel_all
from penstock.workers.sample_calls import SampleCall, SampleOutput
from penstock.workers.training_calls import AdamParams, AdapterSpec, AdapterState, Datum, ForwardOutput, LossCall

TRIES = 4
"""Times that a call is given to an engine before it fails: it may be what ends them."""


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


class ServedEngines:
    """Lifecycle: over a fleet that has started; `close` ends what is under way."""

    def __init__(self, fleet: Fleet, config: RunConfig, tell: Callable[[str], None]) -> None:
        """`tell`: called with what happens to engines, for people."""
        self._fleet, self._config, self._tell = fleet, config, tell
        self._published: dict[str, Any] = {}
        """References to published adapters in Ray's object store, which spills to disk, by name."""
        self._under_way: Counter[str] = Counter()
        self._repairs: dict[str, asyncio.Task[None]] = {}
        """Replacements under way, by the engine's name."""
        self.num_lost = 0
        """How many engines were lost."""

    async def publish(self, sampler: str, state: AdapterState) -> None:
        """Bring an adapter to every engine that is there; the others get it when they start."""
        self._published[sampler] = ray.put(state)
        await self._everywhere("add_adapter", sampler, self._published[sampler])

    async def drop(self, sampler: str) -> None:
        if self._published.pop(sampler, None) is not None:
            await self._everywhere("drop_adapter", sampler)

    async def sample(self, sampler: str | None, call: SampleCall) -> SampleOutput:
        """Sample from an adapter, or from the base model. Raises `DataError` for what cannot be sampled, and what the
        last engine failed with."""
        for number in range(TRIES):
            name, handle = await self._chosen()
            timeout_s = self._config.rollout.generate_timeout_s
            self._under_way[name] += call.num_samples
            try:
                one = (name, handle.sample.remote(sampler, call, uuid.uuid4().hex))
                (output,) = await answers_or_end([one], phase="sample", timeout_s=timeout_s)
                return output  # type: ignore[no-any-return]
            except PenstockError as failure:
                if kind_of(failure) is Kind.ERROR or number == TRIES - 1:
                    raise
                await self._lost(name, handle, failure)
            finally:
                self._under_way[name] -= call.num_samples
        raise AssertionError("the last try raises")

    async def close(self) -> None:
        await cancel_all(list(self._repairs.values()))

    async def _chosen(self) -> tuple[str, Any]:
        """The engine with the fewest samples under way; where none is there, the first that comes back."""
        patience = asyncio.timeout(self._config.rollout.start_timeout_s)
        try:
            async with patience:
                while not (members := self._fleet.role("rollout")):
                    if not self._repairs:
                        self._repair_all()
                    await asyncio.wait(self._repairs.values(), return_when=asyncio.FIRST_COMPLETED)
        except TimeoutError:
            raise DeadlineExceeded(
                f"no engine was there within {self._config.rollout.start_timeout_s:g} s (rollout.start_timeout_s)."
            ) from None
        return min(members, key=lambda member: self._under_way[member[0]])

    async def _everywhere(self, method: str, *arguments: Any) -> None:
        """Call a method of every engine. One that is lost meanwhile is replaced, and knows what is published then."""
        timeout_s = self._config.weights.phase_timeout_s

        async def told(name: str, handle: Any) -> None:
            try:
                call = getattr(handle, method).remote(*arguments)
                await answers([(name, call)], phase=method, timeout_s=timeout_s)
            except PenstockError as failure:
                if kind_of(failure) is Kind.ERROR:
                    raise
                await self._lost(name, handle, failure)

        await asyncio.gather(*(told(name, handle) for name, handle in self._fleet.role("rollout")))

    async def _lost(self, name: str, handle: Any, failure: PenstockError) -> None:
        """Begin to replace an engine, unless another call has. Several others go on meanwhile; one alone is waited
        for."""
        if self._fleet.handle_of(name) is handle:
            self.num_lost += 1
            self._tell(f"{name} is replaced: {first_line(failure)}")
            self._fleet.remove([name])
            self._repair(name)

    def _repair_all(self) -> None:
        for (name,) in self._fleet.teams("rollout"):
            if self._fleet.handle_of(name) is None:
                self._repair(name)

    def _repair(self, name: str) -> None:
        task = self._repairs[name] = asyncio.create_task(self._replaced(name), name=f"replacement of {name}")
        task.add_done_callback(lambda ended: self._ended(name, ended))

    def _ended(self, name: str, task: "asyncio.Task[None]") -> None:
        del self._repairs[name]
        if not task.cancelled() and (failure := task.exception()) is not None:
            self._tell(f"{name} could not be started again: {first_line(failure)}")

    async def _replaced(self, name: str) -> None:
        """Start an engine, bring it all that is published, and give it to callers."""
        members = await self._fleet.start_members([name])
        known: set[str] = set()
        try:
            while missing := [sampler for sampler in self._published if sampler not in known]:
                for sampler in missing:
                    if (state := self._published.get(sampler)) is not None:
                        calls = [(one, handle.add_adapter.remote(sampler, state)) for one, handle in members]
                        await answers(calls, phase="add_adapter", timeout_s=self._config.weights.phase_timeout_s)
                    known.add(sampler)
        except BaseException:
            self._fleet.remove([name])
            raise
        self._fleet.add(members)
        for sampler in known - set(self._published):  # dropped meanwhile
            await self._everywhere("drop_adapter", sampler)

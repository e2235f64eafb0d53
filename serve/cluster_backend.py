"""The `Backend` (`serve/backend.py`) over ranks and engines on a Ray cluster. Ranks are called and replaced together,
each engine is replaced alone, as often and after such pauses as in a run (`recovery/restart.py`).

    call ─▶ every rank, its own share of the data ─▶ answers           a rank is lost ─▶ `TrainerLost` ─▶ `bring_back`
    publish ─▶ every engine         sample ─▶ the engine with the fewest samples under way
                                    it is lost ─▶ another starts and gets the adapters; the call is repeated

What ranks have computed is gone with them: the server creates its adapters again, of snapshots and journals. A sample
that is repeated is the same, as its seed is part of the call.

Whoever was at work alone at a loss is charged for it: a tenant has `faults.max_restarts` of its own, for ranks and for
each engine, beyond which it is refused. Tenants that were at work together at the loss of an engine have no engine in
common for a while after it. A sample that was at work at so many losses of engines, at the last without another such,
is given up, and so is an adapter that an engine is lost with while nothing else is at work on it.
"""

import asyncio
import contextlib
import uuid
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import ray

from penstock.conf.errors import ConfigError, DataError, PenstockError
from penstock.conf.run import RunConfig
from penstock.orchestrator.cluster.fleet.fleet import Fleet
from penstock.orchestrator.cluster.ray_calls import Handles, Kind, answers, answers_or_end, first_line, kind_of, leaves
from penstock.orchestrator.loops.verbs import merge_outputs, shares_of
from penstock.orchestrator.recovery.decisions import FAILED_RESTARTS, RunFaults
from penstock.orchestrator.recovery.restart import Restarts, title_of
from penstock.orchestrator.run_directory.run_directory import RunDirectory
from penstock.serve.backend import BackendFailed, DeadlyRequest, ModelFacts, RequestFailed, TrainerLost
from penstock.workers.protocols import (
    AdamParams,
    AdapterSpec,
    AdapterState,
    Datum,
    ForwardOutput,
    LossCall,
    SampleCall,
    SampleOutput,
)


class BudgetSpent(BackendFailed):
    """A loss after as many restarts as there may be."""


class ClusterBackend:
    """Lifecycle: over a fleet that has started; `run` beside all calls."""

    def __init__(
        self, fleet: Fleet, config: RunConfig, facts: ModelFacts, directory: RunDirectory, tell: Callable[[str], None]
    ) -> None:
        """`tell`: called with what happens to ranks and engines, for people."""
        self._fleet, self._config, self.facts, self.window_s = fleet, config, facts, config.faults.window_s
        self._charged = defaultdict[str, Restarts](lambda: Restarts(directory, tell, RunFaults(config.faults)))
        """Restarts that a tenant or an adapter alone is charged for, by its name; empty: nobody alone."""
        self._turn = asyncio.Lock()
        """Lock of the ranks: they make one call after the other."""
        self._published: dict[str, Any] = {}
        """References to published adapters in Ray's object store, which spills to disk, by name."""
        self._given_up: set[str] = set()
        """Adapters that an engine was lost with, which no engine gets any more."""
        self._at_work = defaultdict[str, Counter[str]](Counter)
        """Number of samples under way on each engine, by tenant."""
        self._apart_until: dict[str, float] = {}
        """Time up to which a tenant shares no engine with another."""
        self._refused_until: dict[str, float] = {}
        """Time up to which a tenant that has spent its budget gets no engine."""
        self._losses: asyncio.Queue[tuple[str, PenstockError, str]] = asyncio.Queue()
        """Engines to replace, each once, with the tenant or adapter that is charged."""
        self._changed = asyncio.Event()
        """Set whenever an engine has come back, or cannot, or is done with a sample."""
        self._failure: BackendFailed | None = None
        self._choosing, self._suspect_alone = asyncio.Lock(), asyncio.Lock()
        self.num_lost = 0
        """How many engines were lost."""

    async def create_adapter(self, name: str, spec: AdapterSpec, state: AdapterState | None = None) -> None:
        if not min(1, self.facts.max_rank) <= spec.rank <= self.facts.max_rank:
            raise DataError(
                f"rank={spec.rank}: adapters have a rank of 1 to {self.facts.max_rank} here. Ask for a smaller one, or "
                "have the server started with a larger serve.max_rank."
            )
        await self._call_ranks("create_adapter", self._for_each_rank(name, spec, state))

    async def drop_adapter(self, name: str) -> None:
        await self._call_ranks("drop_adapter", self._for_each_rank(name))

    async def forward(self, name: str, data: Sequence[Datum], loss: LossCall, *, backward: bool) -> ForwardOutput:
        """Score the data: each rank its share, balanced by cost. Which share a datum is in depends on this call
        alone."""
        trainer = self._config.trainer
        shares = shares_of([len(datum.token_ids) for datum in data], trainer.num_ranks, trainer.ranks_per_row)
        arguments = [(name, [data[position] for position in share], loss, backward) for share in shares]
        return merge_outputs(shares, await self._call_ranks("forward_adapter", arguments))

    async def optim_step(self, name: str, params: AdamParams) -> dict[str, float]:
        return dict((await self._call_ranks("step_adapter", self._for_each_rank(name, params)))[0])

    async def adapter_state(self, name: str) -> AdapterState:
        state: AdapterState = (await self._call_ranks("adapter_state", self._for_each_rank(name)))[0]
        return state

    async def bring_back(self, tenant: str, failure: TrainerLost) -> None:
        faults, (team,) = self._config.faults, self._fleet.teams("trainer")
        if await self._restart("trainer", team, failure, tenant):
            raise DeadlyRequest(f"ranks were lost again after {faults.max_restarts} restarts in {self.window_s:g} s, "
                                "each time while a request of this key was at work (faults.max_restarts)")  # fmt: skip

    def _for_each_rank(self, *arguments: Any) -> list[tuple[Any, ...]]:
        return [arguments] * self._config.trainer.num_ranks

    async def _call_ranks(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Call every rank with its own arguments. Raises `DataError` and `ConfigError` of theirs, `RequestFailed` for
        what would fail again, and `TrainerLost`."""
        async with self._turn:
            members = self._fleet.role("trainer")
            calls = [
                (name, getattr(handle, method).remote(*own))
                for (name, handle), own in zip(members, arguments, strict=True)
            ]
            try:
                return await answers(calls, phase=method, timeout_s=self._config.trainer.step_timeout_s)
            except PenstockError as failure:
                if isinstance(failure, DataError | ConfigError):  # of all ranks alike, which have changed nothing
                    raise
                lost = RequestFailed if kind_of(failure) is Kind.ERROR else TrainerLost
                raise lost(str(failure)) from failure

    async def run(self) -> None:
        """Replace engines that are lost, side by side. Raises `BackendFailed`."""
        try:
            async with asyncio.TaskGroup() as replacements:
                while True:
                    name, failure, whose = await self._losses.get()
                    replacements.create_task(self._replace(name, failure, whose), name=f"replacement of {name}")
        except ExceptionGroup as failures:
            raise leaves(failures)[0] from None

    async def publish(self, sampler: str, state: AdapterState) -> None:
        """Bring an adapter to every engine that is there; the others get it when they start."""
        self._published[sampler] = ray.put(state.for_sampling())
        try:
            await self._call_all_engines("add_adapter", sampler, self._published[sampler])
        except PenstockError:
            await self.drop_sampler(sampler)
            raise

    async def drop_sampler(self, sampler: str) -> None:
        if self._published.pop(sampler, None) is not None or sampler in self._given_up:
            self._given_up.discard(sampler)
            await self._call_all_engines("drop_adapter", sampler)

    async def sample(self, sampler: str | None, call: SampleCall, tenant: str) -> SampleOutput:
        """Sample from an adapter, or from the base model. Raises `DataError` for what cannot be sampled,
        `DeadlyRequest`, and `BackendFailed`."""
        timeout_s, most = self._config.rollout.generate_timeout_s, max(2, self._config.faults.max_restarts)
        for num_lost in range(most):
            async with self._suspect_alone if num_lost == most - 1 else contextlib.nullcontext():
                name, handle = await self._choose_engine(sampler, tenant)
                self._at_work[name][tenant] += call.num_samples
                try:
                    one = (name, handle.sample.remote(sampler, call, uuid.uuid4().hex))
                    (output,) = await answers_or_end([one], phase="sample", timeout_s=timeout_s)
                    return output  # type: ignore[no-any-return]
                except PenstockError as failure:
                    if kind_of(failure) is Kind.ERROR:
                        raise
                    self._queue_replacement(name, handle, failure)
                finally:
                    self._at_work[name] -= Counter({tenant: call.num_samples})
                    self._changed.set()
        self._charged.pop(tenant, None)  # which is refused from here on
        raise DeadlyRequest(
            f"engines were lost {most} times while a request of this key was at work (faults.max_restarts)"
        )

    async def _choose_engine(self, sampler: str | None, tenant: str) -> tuple[str, Any]:
        """The engine with the fewest samples under way of those that a tenant may use; where there is none, the first.
        Who comes first chooses first. The wait ends with samples and with the replacements, each of which has its
        deadline. Raises `DeadlyRequest`, `BackendFailed`."""
        async with self._choosing:
            while True:
                if self._failure is not None:
                    raise self._failure
                if sampler in self._given_up:
                    raise DeadlyRequest("engines were lost while they loaded weights of this key")
                faults = self._config.faults
                if self._refused_until.get(tenant, 0.0) > self._now():
                    raise DeadlyRequest(f"an engine was lost again after {faults.max_restarts} restarts in "
                                        f"{self.window_s:g} s, each time while requests of this key alone were at "
                                        "work (faults.max_restarts)")  # fmt: skip
                members = [member for member in self._fleet.role("rollout") if self._may_use(tenant, member[0])]
                if members:
                    return min(members, key=lambda member: self._at_work[member[0]].total())
                self._changed.clear()
                await self._changed.wait()

    def _may_use(self, tenant: str, engine: str) -> bool:
        users = {tenant, *self._at_work[engine]}
        return len(users) == 1 or all(self._apart_until.get(one, 0.0) <= self._now() for one in users)

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    async def _call_all_engines(self, method: str, sampler: str, *arguments: Any) -> None:
        """Call a method of every engine. One that is lost meanwhile is replaced, and knows what is published then."""

        async def call(name: str, handle: Any) -> None:
            try:
                await self._call_engines([(name, handle)], method, sampler, *arguments)
            except PenstockError as failure:
                if kind_of(failure) is Kind.ERROR:
                    raise
                self._queue_replacement(name, handle, failure, sampler if method == "add_adapter" else "")

        await asyncio.gather(*(call(name, handle) for name, handle in self._fleet.role("rollout")))

    async def _call_engines(self, engines: Handles, method: str, *arguments: Any) -> None:
        calls = [(name, getattr(handle, method).remote(*arguments)) for name, handle in engines]
        await answers(calls, phase=method, timeout_s=self._config.weights.phase_timeout_s)

    def _queue_replacement(self, name: str, handle: Any, failure: PenstockError, adapter: str = "") -> None:
        """Have an engine replaced, unless another call has. Several others go on meanwhile; one alone is waited for.
        `adapter`: the one that it was loading."""
        if self._fleet.handle_of(name) is handle:
            self.num_lost += 1
            self._fleet.remove([name])
            tenants = list(self._at_work[name])
            if len(tenants) > 1 and not adapter:
                self._apart_until |= dict.fromkeys(tenants, self._now() + self.window_s)
            self._losses.put_nowait((name, failure, adapter or (tenants[0] if len(tenants) == 1 else "")))

    async def _replace(self, name: str, failure: PenstockError, whose: str) -> None:
        """Start an engine, bring it all that is published, and give it to callers."""
        try:
            if await self._restart("rollout", [name], failure, whose):
                self._refused_until[whose] = self._now() + self.window_s
        except BackendFailed as error:
            self._failure = error
            raise
        finally:
            self._changed.set()

    async def _restart(self, role: str, team: Sequence[str], failure: PenstockError, whose: str) -> bool:
        """Start other members in place of lost ones. `whose`: who is charged for it. Returns whether this budget was
        spent, and the common one is charged. Raises `BackendFailed`."""
        if whose:
            try:
                await self._start_team(whose, role, team, failure)
            except BudgetSpent:
                del self._charged[whose]
            else:
                return False
        await self._start_team("", role, team, failure)
        return bool(whose)

    async def _start_team(self, whose: str, role: str, team: Sequence[str], failure: PenstockError) -> None:
        """Start other members in place of lost ones. Raises `BackendFailed`, and `BudgetSpent` beyond the budget."""
        title, restarts = title_of(team), self._charged[whose]
        failed_starts: list[PenstockError] = []

        async def start() -> None:
            self._fleet.remove(team)  # those of a start that has failed, too
            try:
                members = await self._fleet.start_members(team)
                if role == "rollout":
                    await self._catch_up(members)
            except PenstockError as error:
                failed_starts.append(error)
                raise
            self._fleet.add(members)

        self._fleet.remove(team)
        restarts.step += 1  # a request is given up by its tenant's losses, and not as a step that is lost twice
        try:
            await restarts.start_replacement(role, title, failure, start)
        except PenstockError as error:
            if error is not failure or len(failed_starts) >= FAILED_RESTARTS:
                raise BackendFailed(f"{title} cannot be started again: {first_line(failed_starts[-1])}") from error
            why = first_line(error)
            raise BudgetSpent(f"{title} was lost again after faults.max_restarts restarts: {why}") from error

    async def _catch_up(self, engines: Handles) -> None:
        """Bring engines all that is published, also meanwhile. What one of them is lost with is given up: nothing else
        is at work on it."""
        known: set[str] = set()
        while (due := dict(self._published)).keys() != known:
            for sampler in due.keys() ^ known:
                if sampler in due:
                    try:
                        await self._call_engines(engines, "add_adapter", sampler, due[sampler])
                    except PenstockError:
                        self._given_up.add(sampler)
                        self._published.pop(sampler, None)
                        raise
                else:
                    await self._call_engines(engines, "drop_adapter", sampler)
            known = set(due)

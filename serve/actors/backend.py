"""The `Backend` (`serve/backend.py`) over ranks and engines on a Ray cluster. Ranks are called and replaced together,
each engine is replaced alone, as often and after such pauses as in a run (`membership/restarts.py`).

    call ─▶ every rank, its own share of the data ─▶ answers           a rank is lost ─▶ `TrainerLost` ─▶ `bring_back`
    publish ─▶ every engine         sample ─▶ the engine with the fewest samples under way
                                    it is lost ─▶ another starts and gets the adapters; the call is repeated

What ranks have computed is gone with them: the server creates its adapters again, of snapshots and journals. A sample
that is repeated is the same, as its seed is part of the call.

Who is to blame for losses is counted. Ranks have one request at work: its tenant has `faults.max_restarts` of its own.
Engines have many: one that was at work at so many losses of engines, at the last without another such, is given up.
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
from penstock.orchestrator.cluster.failures import Kind, first_line, kind_of, leaves
from penstock.orchestrator.cluster.fleet.fleet import Fleet
from penstock.orchestrator.cluster.ray_calls import Handles, answers, answers_or_end
from penstock.orchestrator.loops.verbs import put_together, shares_of
from penstock.orchestrator.membership.recoveries import Recoveries
from penstock.orchestrator.membership.recovery import FAILED_RESTARTS
from penstock.orchestrator.membership.restarts import Restarts, title_of
from penstock.orchestrator.membership.supervisor import CatchUp, nothing_to_catch_up
from penstock.orchestrator.run_directory.run_directory import RunDirectory
from penstock.serve.backend import BackendFailed, DeadlyRequest, ModelFacts, RequestFailed, TrainerLost
from penstock.workers.calls.sample_calls import SampleCall, SampleOutput
from penstock.workers.calls.training_calls import AdamParams, AdapterSpec, AdapterState, Datum, ForwardOutput, LossCall


class BudgetSpent(BackendFailed):
    """A loss after as many restarts as there may be."""


async def replace(
    fleet: Fleet, restarts: Restarts, role: str, team: Sequence[str], failure: Exception,
    catch_up: CatchUp = nothing_to_catch_up,
) -> None:  # fmt: skip
    """Start other members in place of lost ones. Raises `BackendFailed`, which is `BudgetSpent` if that is not to be
    tried any more."""
    title = title_of(team)
    failed_starts: list[PenstockError] = []

    async def start() -> None:
        fleet.remove(team)  # those of a start that has failed, too
        try:
            members = await fleet.start_members(team)
            restarts.started(title)
            await catch_up(members)
        except PenstockError as error:
            failed_starts.append(error)
            raise
        fleet.add(members)

    fleet.remove(team)
    restarts.step += 1  # a request is given up by its tenant's losses, and not as a step that is lost twice
    try:
        await restarts.start_anew(role, title, failure, start)
    except PenstockError as error:
        if error is not failure or len(failed_starts) >= FAILED_RESTARTS:
            raise BackendFailed(f"{title} cannot be started again: {first_line(failed_starts[-1])}") from error
        raise BudgetSpent(f"{title} was lost again after faults.max_restarts restarts: {first_line(error)}") from error


class ServedEngines:
    """Lifecycle: over a fleet that has started; `run` beside all calls."""

    def __init__(self, fleet: Fleet, config: RunConfig, restarts: Restarts) -> None:
        """`restarts`: of engines, and of ranks beyond the bound of a tenant."""
        self._fleet, self._config, self._restarts = fleet, config, restarts
        self._published: dict[str, Any] = {}
        """References to published adapters in Ray's object store, which spills to disk, by name."""
        self._under_way: Counter[str] = Counter()
        self._losses: asyncio.Queue[tuple[str, PenstockError]] = asyncio.Queue()
        """Engines to replace, each once."""
        self._changed = asyncio.Event()
        """Set whenever an engine has come back, or cannot."""
        self._failure: BackendFailed | None = None
        self._suspect_alone = asyncio.Lock()
        self._pardoned: set[str] = set()
        """Engines whose losses have a cause that is refused from then on: their budgets begin anew."""
        self.num_lost = 0
        """How many engines were lost."""

    async def run(self) -> None:
        """Replace engines that are lost, side by side. Raises `BackendFailed`."""
        try:
            async with asyncio.TaskGroup() as replacements:
                while True:
                    name, failure = await self._losses.get()
                    replacements.create_task(self._replace(name, failure), name=f"replacement of {name}")
        except ExceptionGroup as failures:
            raise leaves(failures)[0] from None

    async def publish(self, sampler: str, state: AdapterState) -> None:
        """Bring an adapter to every engine that is there; the others get it when they start."""
        self._published[sampler] = ray.put(state.for_sampling())
        await self._everywhere("add_adapter", sampler, self._published[sampler])

    async def drop_sampler(self, sampler: str) -> None:
        if self._published.pop(sampler, None) is not None:
            await self._everywhere("drop_adapter", sampler)

    async def sample(self, sampler: str | None, call: SampleCall) -> SampleOutput:
        """Sample from an adapter, or from the base model. Raises `DataError` for what cannot be sampled,
        `DeadlyRequest`, and `BackendFailed`."""
        timeout_s, most = self._config.rollout.generate_timeout_s, max(2, self._config.faults.max_restarts)
        lost: list[str] = []
        while len(lost) < most:
            async with self._suspect_alone if len(lost) == most - 1 else contextlib.nullcontext():
                name, handle = await self._chosen()
                self._under_way[name] += call.num_samples
                try:
                    one = (name, handle.sample.remote(sampler, call, uuid.uuid4().hex))
                    (output,) = await answers_or_end([one], phase="sample", timeout_s=timeout_s)
                    return output  # type: ignore[no-any-return]
                except PenstockError as failure:
                    if kind_of(failure) is Kind.ERROR:
                        raise
                    self._lost(name, handle, failure)
                finally:
                    self._under_way[name] -= call.num_samples
            lost.append(name)
        self._pardoned.update(lost)
        raise DeadlyRequest(
            f"engines were lost {most} times while a request of this key was at work (faults.max_restarts)"
        )

    async def _chosen(self) -> tuple[str, Any]:
        """The engine with the fewest samples under way; where none is there, the first that comes back. The wait ends
        with the replacements, each of which has its deadline. Raises `BackendFailed`."""
        while not (members := self._fleet.role("rollout")) and self._failure is None:
            self._changed.clear()
            await self._changed.wait()
        if self._failure is not None:
            raise self._failure
        return min(members, key=lambda member: self._under_way[member[0]])

    async def _everywhere(self, method: str, *arguments: Any) -> None:
        """Call a method of every engine. One that is lost meanwhile is replaced, and knows what is published then."""

        async def told(name: str, handle: Any) -> None:
            try:
                await self._call([(name, handle)], method, *arguments)
            except PenstockError as failure:
                if kind_of(failure) is Kind.ERROR:
                    raise
                self._lost(name, handle, failure)

        await asyncio.gather(*(told(name, handle) for name, handle in self._fleet.role("rollout")))

    async def _call(self, engines: Handles, method: str, *arguments: Any) -> None:
        calls = [(name, getattr(handle, method).remote(*arguments)) for name, handle in engines]
        await answers(calls, phase=method, timeout_s=self._config.weights.phase_timeout_s)

    def _lost(self, name: str, handle: Any, failure: PenstockError) -> None:
        """Have an engine replaced, unless another call has. Several others go on meanwhile; one alone is waited for."""
        if self._fleet.handle_of(name) is handle:
            self.num_lost += 1
            self._fleet.remove([name])
            self._losses.put_nowait((name, failure))

    async def _replace(self, name: str, failure: PenstockError) -> None:
        """Start an engine, bring it all that is published, and give it to callers."""
        if name in self._pardoned:
            self._pardoned.remove(name)
            self._restarts.left(name)
        try:
            await replace(self._fleet, self._restarts, "rollout", [name], failure, self._catch_up)
        except BackendFailed as error:
            self._failure = error
            raise
        finally:
            self._changed.set()

    async def _catch_up(self, engines: Handles) -> None:
        """Bring engines all that is published, also meanwhile."""
        known: set[str] = set()
        while (due := dict(self._published)).keys() != known:
            for sampler in due.keys() ^ known:
                if sampler in due:
                    await self._call(engines, "add_adapter", sampler, due[sampler])
                else:
                    await self._call(engines, "drop_adapter", sampler)
            known = set(due)


class ClusterBackend(ServedEngines):
    """Ranks beside the engines. Lifecycle: theirs."""

    def __init__(
        self, fleet: Fleet, config: RunConfig, facts: ModelFacts, directory: RunDirectory, tell: Callable[[str], None]
    ) -> None:
        """`tell`: called with what happens to ranks and engines, for people."""
        self.facts, self.window_s = facts, config.faults.window_s
        self._by_tenant = defaultdict[str, Restarts](lambda: Restarts(directory, tell, Recoveries(config.faults)))
        """Restarts of ranks, by the tenant whose requests were at work."""
        super().__init__(fleet, config, Restarts(directory, tell, Recoveries(config.faults)))
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

    async def bring_back(self, tenant: str, failure: TrainerLost) -> None:
        faults, (team,) = self._config.faults, self._fleet.teams("trainer")
        try:
            await replace(self._fleet, self._by_tenant[tenant], "trainer", team, failure)
        except BudgetSpent:
            del self._by_tenant[tenant]
        else:
            return
        await replace(self._fleet, self._restarts, "trainer", team, failure)
        raise DeadlyRequest(
            f"ranks were lost again after {faults.max_restarts} restarts in {faults.window_s:g} s, each time while "
            "a request of this key was at work (faults.max_restarts)"
        )

    def _same(self, *arguments: Any) -> list[tuple[Any, ...]]:
        return [arguments] * self._config.trainer.num_ranks

    async def _all(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
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

"""The members that serve in a run: those of the start, those that join while it continues, and those that leave.

    join   room and a node (`fleet/capacity.py`) ─▶ another starts ─▶ it loads the newest weights ─▶ serving
    leave  it takes no more leases ─▶ finishes what it has ─▶ gives back the rest ─▶ its process ends

No other member waits for any of it. A member that joins is kept serving like all others (`recovery/restart.py`).

The agents of the run's nodes are watched. A node that the run depends on may not end before the run. Any other may
leave: its members are gone with it, their unfinished rows are made again, and others take their place where there is
room.
"""

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.conf.errors import CannotScale, PartnerGone, PenstockError
from penstock.conf.run import RunConfig
from penstock.conf.weights import replaces_members, takes_newcomers
from penstock.orchestrator.cluster.fleet.fleet import Fleet
from penstock.orchestrator.cluster.ray_calls import Handles, first_line, held_back, translate, try_all
from penstock.orchestrator.cluster.weight_sync import WeightSync
from penstock.orchestrator.control.scaling_requests import (
    MET_AT_START,
    OWN_OF_EVALUATION,
    ROLES,
    ScalingRequest,
    ScalingResult,
    change_of,
    who_leaves,
)
from penstock.orchestrator.recovery.restart import CatchUp, Recovery, nothing_to_catch_up
from penstock.orchestrator.run_context import RunContext

DRAIN_GRACE_S = 30.0
"""Seconds beyond its drain time for a member to say that it has finished."""


class Membership:
    """Lifecycle: `begin` in the controller's task group, `serve` the roles one after the other, then `change` any
    number of times, `close`, `ended`."""

    def __init__(
        self,
        context: RunContext,
        recovery: Recovery,
        catch_up: Mapping[str, CatchUp],
        wanted: dict[str, int] | None = None,
    ) -> None:
        """`catch_up`: what new members of a role do before they serve; roles that are not in it take none. `wanted`:
        numbers of members that were asked for, by role; kept up to date for the `Membership` after a return."""
        self.staying = asyncio.Lock()
        """Lock of a caller that needs the present members to stay for a while."""
        self._fleet, self._flow, self._config = context.fleet, context.flow, context.config
        self._store, self._directory, self._progress = context.store, context.directory, context.progress
        self._restarts, self._store_restart, self.supervisor = recovery.restarts, recovery.store, recovery.supervisor
        self._catch_up = catch_up
        self._tasks: asyncio.TaskGroup | None = None
        self._until_end: list[asyncio.Task[Any]] = []
        self._watched_nodes: set[str] = set()
        self._changing, self._making_room = asyncio.Lock(), asyncio.Lock()
        self._joining: dict[str, asyncio.Task[str]] = {}
        """Tasks of members that join, by name."""
        self._keeping: dict[asyncio.Task[None], Sequence[str]] = {}
        """Tasks that keep members serving, each with its team."""
        self._kept: set[str] = set()
        """Names of members that are kept serving, or were: no name comes again."""
        self._wanted = wanted if wanted is not None else {}

    def begin(self, tasks: asyncio.TaskGroup) -> None:
        self._tasks = tasks
        self._watch_nodes()

    def until_end(self, work: Any) -> None:
        """Start a task that ends with the serving, and whose failure ends the run."""
        assert self._tasks is not None
        self._until_end.append(self._tasks.create_task(work))

    def serve(self, *roles: str) -> None:
        """Let actors pull from the store by themselves. Engines and rewards that are there for evaluation only do
        not."""
        for role in roles:
            if role not in ROLES or self._flow.of_kind(role):
                for team in self._fleet.teams(role):
                    if not (self._joining.keys() | self._kept) & set(team):  # who joins is kept once it has
                        self._keep(role, team)

    def close(self) -> None:
        """Cancel the tasks of `until_end`: no member joins or leaves any more."""
        for task in self._until_end:
            task.cancel()

    async def ended(self) -> None:
        """Wait until the members have ended, once the store has closed. Those that have not in time are killed: nothing
        of theirs is needed any more."""
        if self._keeping:
            await asyncio.wait(self._keeping, timeout=self._config.cluster.shutdown_timeout_s)
        late = sorted(name for team in self._keeping.values() for name in team)
        for task in self._keeping:
            task.cancel()
        if late:
            self._directory.event("not_ended", members=late)
            self._fleet.kill(late)

    def num_present(self, role: str) -> int:
        """Number of members of a role that are there or to come, in one stage."""
        stages = self._stages(role)
        return len(stages[0][1]) if stages else 0

    async def change(self, requests: Sequence[ScalingRequest], drain_s: float | None = None) -> list[ScalingResult]:
        """Grant requests, one role each, all of them or none. Returns the result of each. `drain_s`: seconds for
        leaving members to finish what they have; None: `rollout.drain_s`. Raises `CannotScale`."""
        async with self._changing:
            if len({request.role for request in requests}) < len(requests):
                raise CannotScale(f"{' '.join(map(str, requests))}: one request a role.")
            refusals = self._refusals()
            changes = [(one.role, change_of(one, self.num_present(one.role), refusals)) for one in requests]
            if not self._follows(requests):
                self._wanted |= {role: self.num_present(role) + change for role, change in changes}
            drain_s = self._config.rollout.drain_s if drain_s is None else drain_s
            return list(await asyncio.gather(*(self._change(role, change, drain_s) for role, change in changes)))

    async def grant_again(self) -> None:
        """Grant what was asked for before the run returned to its checkpoint, as it begins with the members of the
        start."""
        if requests := [ScalingRequest(role, number) for role, number in self._wanted.items()]:
            with contextlib.suppress(CannotScale):
                await self.change(requests)

    async def _change(self, role: str, change: int, drain_s: float) -> ScalingResult:
        done = ScalingResult(role, self.num_present(role))
        if change > 0:
            names = [name for name in await self._make_room(role, change, done) if self._is_planned(name)]
            for name in names:
                self._joining[name] = asyncio.ensure_future(self._join(role, name))
            joining = [self._joining[name] for name in names]
            try:
                results = await asyncio.gather(*joining, return_exceptions=True)
            finally:
                for name, task in zip(names, joining, strict=True):
                    task.cancel()
                    del self._joining[name]
            for name, result in zip(names, results, strict=True):
                if isinstance(result, str):
                    done.joined.append(f"{name} on {result}")
                elif isinstance(result, PenstockError):
                    done.problems.append(f"{name} did not start: {first_line(result)}")
                elif isinstance(result, asyncio.CancelledError):
                    done.problems.append(f"{name} is gone with its node.")
                else:
                    raise result
        leaving = [name for _, names in self._stages(role) for name in who_leaves(names, -change)] if change < 0 else []
        await asyncio.gather(*(self._leave(role, name, drain_s) for name in leaving))
        done.left = leaving
        done.after = self.num_present(role)
        return done

    async def _make_room(self, role: str, count: int, done: ScalingResult) -> list[str]:
        """Plan members that can join, one after the other. Returns their names. What keeps more from joining is a
        problem of the result."""
        names: list[str] = []
        for _ in range(count):
            for stage, _ in self._stages(role):
                try:
                    async with self._making_room:
                        names.append(await self._fleet.capacity.enlarge(role, stage))
                except PenstockError as error:
                    done.problems.append(str(error))
                    about = {"role": role, "step": self._restarts.step, "error": type(error).__name__}
                    self._directory.event("join_failed", **about, message=str(error))
                    return names
        return names

    async def _join(self, role: str, name: str) -> str:
        """Start a member that joins. Returns its node. Raises the reason why it does not serve."""
        began, place = time.monotonic(), self._fleet.capacity.place_of(name)
        try:
            members = await self._fleet.start_members([name])
            await self._catch_up[role](members)
            self._fleet.add(members)
        except BaseException as error:
            if self._is_planned(name):
                await self._fleet.end(*self._fleet.take_out(name))
            if isinstance(error, PenstockError):
                facts = {"role": role, "member": name, "node": place, "step": self._restarts.step}
                facts["error"] = type(error).__name__
                self._directory.event("join_failed", **facts, message=str(error))
                self._progress.note(f"{name} cannot join: {first_line(error)}")
            raise
        self._keep(role, [name])
        self._report("joined", role, name, place, time.monotonic() - began)
        return place

    async def _leave(self, role: str, name: str, drain_s: float) -> None:
        began, place = time.monotonic(), self._fleet.capacity.place_of(name)
        self.supervisor.expect_end(name)
        if (handle := self._fleet.handle_of(name)) is not None:  # else it was lost, and has nothing to finish
            await drain([(name, handle)], drain_s)
        async with self.staying:
            if not self._is_planned(name):  # its node has left meanwhile
                return
            taken = self._fleet.take_out(name)
        await self._fleet.end(*taken)
        with contextlib.suppress(PenstockError):  # what it could not give back itself, to a store that is there
            await self._store.abandon(name)
        self._report("left", role, name, place, time.monotonic() - began)

    def _report(self, kind: str, role: str, name: str, place: str, seconds: float) -> None:
        step = self._restarts.step
        self._directory.event(kind, role=role, member=name, node=place, step=step, seconds=round(seconds, 3))
        self._progress.note(f"{name} has {kind} on {place}, after {seconds:.1f} s")

    def _keep(self, role: str, team: Sequence[str]) -> None:
        assert self._tasks is not None
        self._kept.update(team)
        keeping = self.supervisor.keep(role, team, self._catch_up.get(role))
        task = self._tasks.create_task(held_back(keeping))
        self._keeping[task] = team
        task.add_done_callback(self._keeping.pop)

    def _stages(self, role: str) -> list[tuple[str | None, list[str]]]:
        """Names of a role by stage, in the order in which they came."""
        stages: dict[str | None, list[str]] = {}
        for actor in self._fleet.plan:
            if actor.role == role:
                stages.setdefault(actor.stage, []).append(actor.name)
        return list(stages.items())

    def _refusals(self) -> dict[str, str]:
        """Reasons for the roles that cannot change, by role."""
        found = {}
        for role in ROLES:
            if not self._flow.of_kind(role):
                found[role] = f"the dataflow of {self._config.algorithm.name} has no {role} stage."
            elif role == "rollout" and not takes_newcomers(self._config):
                found[role] = MET_AT_START
            elif role == "rollout" and self._config.evaluation.num_workers:
                found[role] = OWN_OF_EVALUATION
        return found

    def _watch_nodes(self) -> None:
        """Watch the nodes of the run that are not watched yet, now and whenever one is new."""
        self._fleet.capacity.on_node = self._watch_nodes
        for node, name, handle in self._fleet.capacity.nodes:
            if node not in self._watched_nodes:
                self._watched_nodes.add(node)
                self.until_end(held_back(self._watch_node(node, name, handle)))

    async def _watch_node(self, node: str, name: str, handle: Any) -> None:
        capacity, failure = self._fleet.capacity, await _end_of(name, handle)
        if not capacity.can_lose(node):
            self._restarts.give_up("agent", name, failure)
            raise failure from None
        self._directory.event("node_left", node=name.removeprefix("Agent-"), message=first_line(failure))
        leaving = self._end_with_node(capacity.names_on(node))
        await self._store_restart.retry(lambda: self._store.lost(node))
        capacity.forget_node(node)  # from here on its other members may start again, elsewhere or there
        self._watched_nodes.discard(node)
        await self._replace_lost(leaving)

    def _end_with_node(self, names: Sequence[str]) -> list[str]:
        """End members that are gone with their node. Some leave for good, whose names are returned. The rest start
        again elsewhere, by the callers that miss them."""
        capacity = self._fleet.capacity
        leaving = [actor.name for actor in self._fleet.plan if actor.name in names and capacity.can_leave(actor)]
        for name in leaving:
            if name in self._joining:
                self._joining[name].cancel()
            self.supervisor.expect_end(name)
        self._fleet.kill(names)
        self._fleet.remove(leaving)
        return leaving

    async def _replace_lost(self, leaving: Sequence[str]) -> None:
        """Take out members that have left with their node. Others make up the number of the start, where there is
        room."""
        gone: Counter[str] = Counter()
        for name in leaving:
            if not self._is_planned(name):  # it has left meanwhile
                continue
            role, place = self._role_of(name), self._fleet.capacity.place_of(name)
            actor, handle = self._fleet.take_out(name)
            await self._fleet.end(actor, handle)
            with contextlib.suppress(PenstockError):
                await self._store.abandon(name)
            self._report("left", role, name, place, 0.0)
            gone[role] += 1
        for role, count in gone.items():
            async with self._changing:
                lacking = min(count, self._number_of_start(role) - self.num_present(role))
                if lacking > 0 and not self._follows([ScalingRequest(role, lacking)]):
                    await self._change(role, lacking, 0.0)

    def _number_of_start(self, role: str) -> int:
        """Number of members that the run began with, or the smaller one that was asked for."""
        of_start = self._config.num_engines if role == "rollout" else self._config.reward.num_workers
        return min(of_start, self._wanted.get(role, of_start))

    def _follows(self, requests: Sequence[ScalingRequest]) -> bool:
        """Return whether a request is about engines whose number follows the room on the cluster."""
        return self._config.rollout.follows_cluster and any(request.role == "rollout" for request in requests)

    def _is_planned(self, name: str) -> bool:
        return any(actor.name == name for actor in self._fleet.plan)

    def _role_of(self, name: str) -> str:
        return next(actor.role for actor in self._fleet.plan if actor.name == name)


async def _end_of(name: str, handle: Any) -> Exception:
    """The failure of an agent that ends: it is to end with its run and not before."""
    try:
        await handle.run.remote()
    except Exception as error:  # noqa: BLE001 - every way in which an actor can fail has a named error
        return translate(error, name)
    return PartnerGone(f"{name} has ended before the run was over.")


async def drain(members: Handles, drain_s: float) -> None:
    """Let members finish what they have before they leave. One that is dead, or does not say in time that it has
    finished, is left as it is. `members`: names and handles."""
    await try_all(members, "drain", drain_s, phase="drain", timeout_s=drain_s + DRAIN_GRACE_S)


def catch_up_by_role(config: RunConfig, weights: WeightSync) -> dict[str, CatchUp]:
    """The calls by which new members catch up before they serve, by role. Roles that are not in
    it cannot be replaced alone: engines that the trainers stream weights to have met these at the start."""
    catching: dict[str, CatchUp] = dict.fromkeys(
        ("prompts", "environment", "reward", "compute", "scorer"), nothing_to_catch_up
    )
    if replaces_members(config):
        catching["rollout"] = weights.catch_up
    return catching


LOOK_S = 0.1
"""Seconds between two looks at which engines there are."""


TELL_S = 10.0
"""Deadline for an environment to answer; one that does not is asked again."""


class EngineDirectory:
    """Sends the environments the list of engines, whenever one has joined, died, or been replaced.

    An engine is in its role only once it serves the newest weights, so an environment never samples under older ones
    than the store allows.

    Lifecycle: `tell` once before the environments serve, then `run` until it is cancelled.
    """

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._engines: Handles = []
        self._version = 0
        """The list's version: engines are compared once a look, and not once for each environment."""
        self._told: dict[str, tuple[Any, int]] = {}
        """Handle of each environment, and the version that it knows, by name."""

    async def run(self) -> None:
        while True:
            await self.tell()
            await asyncio.sleep(LOOK_S)

    async def tell(self) -> bool:
        """Tell the environments that do not know the present engines yet. Returns whether all know them now."""
        engines = self._fleet.role("rollout")
        if engines != self._engines:
            self._engines, self._version = engines, self._version + 1
        version, environments = self._version, self._fleet.role("environment")
        behind = [(name, handle) for name, handle in environments if self._told.get(name) != (handle, version)]
        heard = await try_all(behind, "engines", engines, phase="tell the engines", timeout_s=TELL_S)
        for (name, handle), answer in zip(behind, heard, strict=True):
            if not isinstance(answer, Exception):
                self._told[name] = (handle, version)
        there = self._fleet.role("environment")
        return version == self._version and all(self._told.get(name) == (handle, version) for name, handle in there)

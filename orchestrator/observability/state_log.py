"""Writes the state of a run to `state.json` every few seconds: which actors are there and what each does, the store's
rows by stage, the holder of each lease, which actors wait for which, and the version that each engine serves.

    an engine without prompts ─▶ Prompts ─▶ ranks that have not published ─▶ the reward that has the last rows ─▶ …

Who waits is found from what the store says of its leases and of the actors that ask for some, and from the stages that
rows pass; this part is pure but for a look at the fleet. The page's *Cluster* shows the state. What does not answer in
time is left out, and the run never waits.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.algorithms.graph.dataflow import Dataflow
from penstock.conf.errors import PenstockError
from penstock.orchestrator.cluster.fleet.fleet import Fleet
from penstock.orchestrator.cluster.ray_calls import answer, outcomes
from penstock.orchestrator.run_directory.run_directory import RunDirectory
from penstock.workers.runtime.serving import SERVES, Progress

LEAST_S = 2.0
"""Least seconds between two looks."""
MEMBER_S = 0.02
"""Seconds of the pause for each member: a thousand are looked at every twenty seconds."""
SHARE = 50.0
"""Least pause after a look, in multiples of the time that it took."""
ANSWER_S = 2.0
"""Deadline for members to say what they do."""
MOST_LEASES = 200
"""Most leases that are written."""
SOURCE = "source"
PROMPTS = "prompts"
A_PROMPT = "a prompt"
"""The thing that is waited for where nothing is under way."""
MOST_AWAITED = 32
"""Most actors that are told of as holding what a stage lacks: those that have held it longest. 64 ranks that wait for a
thousand engines would be 64,000 waits."""


class StateLog:
    """Lifecycle: `run` until it is cancelled."""

    def __init__(
        self,
        fleet: Fleet,
        flow: Dataflow,
        describe: Callable[[], Awaitable[Mapping[str, Any]]],
        weights: Callable[[], Mapping[str, Any]],
        step: Callable[[], int],
        heard: Callable[[], Mapping[str, Progress]],
        directory: RunDirectory,
    ) -> None:
        """`describe`: asks the store for its state. `weights`: returns the versions that are told, loaded, and served
        by each engine. `step`: the one under way. `heard`: what members said at their last heartbeats, by name."""
        self._fleet, self._flow, self._directory = fleet, flow, directory
        self._describe, self._weights, self._step, self._heard = describe, weights, step, heard

    async def run(self) -> None:
        while True:
            began = time.monotonic()
            await asyncio.to_thread(self._directory.write_state, await self._state())
            took = time.monotonic() - began
            await asyncio.sleep(max(self._pause_s, SHARE * took))

    @property
    def _pause_s(self) -> float:
        """Seconds between two looks that take no time."""
        return max(LEAST_S, MEMBER_S * len(self._fleet.watched))

    async def _state(self) -> dict[str, Any]:
        members = await self._members()
        described = await self._described()
        views = stages_of(self._flow, self._fleet)
        state = {
            "time": time.time(),
            "step": self._step(),
            "nodes": [
                {"id": node.id, "name": node.name, "address": node.address, "cpus": node.cpus, "gpus": node.gpus}
                for node in self._fleet.machines
            ],
            "members": members,
            "stages": [dict(vars(view)) for view in views],
            "weights": dict(self._weights()),
        }
        if described is None:
            return state | {"store": None, "waits": []}
        leases = longest_first(described["leases"])
        waits = [dict(vars(wait)) for wait in waits_of(described, views)]
        return state | {"store": {**described, "leases": leases[:MOST_LEASES]}, "waits": waits}

    async def _members(self) -> list[dict[str, Any]]:
        watched = self._fleet.watched
        said = await self._said(watched)
        stage_of = {actor.name: actor.stage for actor in self._fleet.plan}
        found = []
        for role, name, _ in watched:
            progress = said.get(name)
            facts = {
                "name": name,
                "role": role,
                "stage": stage_of.get(name),
                "node": self._fleet.node_of(name),
            }
            found.append(facts | ({"phase": None} if progress is None else vars(progress)))
        return found

    async def _said(self, watched: Sequence[tuple[str, str, Any]]) -> Mapping[str, Progress]:
        """Progress of the actors that answer, by name. Where heartbeats come as often as these looks, none is asked
        again."""
        if self._pause_s >= self._fleet.config.faults.heartbeat_s:
            return self._heard()
        calls = [(name, handle.progress.remote()) for _, name, handle in watched]
        answers = await outcomes(calls, phase="state", timeout_s=ANSWER_S)
        return {
            name: said or SERVES
            for (name, _), said in zip(calls, answers, strict=True)
            if not isinstance(said, Exception)
        }

    async def _described(self) -> Mapping[str, Any] | None:
        try:
            return await answer(self._describe(), name="Store", phase="state", timeout_s=ANSWER_S)  # type: ignore[no-any-return]
        except PenstockError:  # it is being replaced, or busy: the page says that it does not answer
            return None


@dataclass(frozen=True)
class StageView:
    name: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    members: tuple[str, ...]
    """Actors that serve the stage now."""


def stages_of(flow: Dataflow, fleet: Fleet) -> list[StageView]:
    """Views of the stages, the source first, the train stage last."""
    serving: dict[str, list[str]] = {}
    there = fleet.actors
    for actor in fleet.plan:
        if actor.stage is not None and actor.name in there:
            serving.setdefault(actor.stage, []).append(actor.name)
    return views_of(flow, serving)


def views_of(flow: Dataflow, serving: Mapping[str, Sequence[str]]) -> list[StageView]:
    """Views of the stages. `serving`: members by stage."""
    stages = [stage for stage in flow.stages if stage.kind in ("source", "train") or not stage.is_in_trainer]
    return [
        StageView(
            stage.name,
            tuple(stage.reads),
            tuple(column.name for column in stage.writes),
            tuple(serving.get(stage.name, ())),
        )
        for stage in stages
    ]


def before(stage: StageView, stages: Sequence[StageView]) -> list[StageView]:
    """Stages that write what a stage reads."""
    return [one for one in stages if one.name != stage.name and set(one.writes) & set(stage.reads)]


def awaited(stages: Sequence[StageView]) -> dict[str, str]:
    """Names of what each member waits for when idle, by member: the stages before its own, or prompts. The members that
    bring the prompts wait for no rows."""
    found: dict[str, str] = {}
    for stage in (one for one in stages if one.name != SOURCE):
        names = [one.name for one in before(stage, stages) if one.name != SOURCE]
        found |= dict.fromkeys(stage.members, " and ".join(names) or PROMPTS)
    return found


@dataclass(frozen=True)
class Wait:
    who: str
    on: str
    what: str


def waits_of(described: Mapping[str, Any], stages: Sequence[StageView]) -> list[Wait]:
    """All waits, each once. `described`: what `StoreClient.describe` says. `stages`: in the order of the dataflow, its
    source and its train stage among them."""
    found: dict[Wait, None] = {}
    by_name = {stage.name: stage for stage in stages}
    for name, count in (described.get("waiting") or {}).items():
        if not count:
            continue
        if name == "put":
            found |= dict.fromkeys(_for_credits(described, stages))
        elif name in by_name:
            blockers = list(_blockers(described, stages, by_name[name], frozenset()))
            held = [one for one in blockers if one[1] != A_PROMPT] or blockers
            for who in _idle(described, by_name[name]):
                found |= {Wait(who, on, what): None for on, what in held[:MOST_AWAITED] if on != who}
    return list(found)


def longest_first(leases: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Leases, the longest held first; those of unknown time come last."""
    return sorted(leases, key=lambda lease: -(lease.get("held_s") or 0.0))


def _idle(described: Mapping[str, Any], stage: StageView) -> list[str]:
    """Actors that ask for rows of a stage and hold none of it. Ranks that share rounds are counted by the store and not
    named: all of them ask for each."""
    busy = {lease["owner"] for lease in described.get("leases") or () if lease["stage"] == stage.name}
    named = dict.fromkeys((described.get("waiters") or {}).get(stage.name) or stage.members)
    return [name for name in named if name not in busy]


def _blockers(
    described: Mapping[str, Any], stages: Sequence[StageView], stage: StageView, seen: frozenset[str]
) -> Iterator[tuple[str, str]]:
    """Actors that hold what the stage lacks, or else those before them, each with what it holds."""
    for one in before(stage, stages):
        if one.name in seen:
            continue
        if one.name == SOURCE:
            yield from ((member, A_PROMPT) for member in one.members)
            continue
        owners: dict[str, int] = {}
        for lease in longest_first(described.get("leases") or ()):
            if lease["stage"] == one.name:
                owners[lease["owner"]] = owners.get(lease["owner"], 0) + int(lease["open_rows"])
        free = int(((described.get("rows") or {}).get(one.name) or {}).get("free") or 0)
        if owners:
            yield from ((owner, f"{rows} row(s) of {one.name}") for owner, rows in owners.items())
        elif free:
            yield from ((member, f"{free} row(s) that {one.name} has not taken") for member in one.members)
        else:
            yield from _blockers(described, stages, one, seen | {stage.name})


def _for_credits(described: Mapping[str, Any], stages: Sequence[StageView]) -> Iterator[Wait]:
    """Waits of the prompts until a version is out that trained what is under way."""
    credits = described.get("credits") or {}
    under_way = f"{credits.get('active')} of {credits.get('max')} groups are under way"
    what = f"version {int(credits.get('served') or 0) + 1} ({under_way})"
    for source in (stage for stage in stages if stage.name == SOURCE):
        for member in source.members:
            yield from (Wait(member, rank, what) for rank in stages[-1].members)

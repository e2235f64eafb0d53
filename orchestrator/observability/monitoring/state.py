"""Writes the state of a run to `state.json` every few seconds: which actors are there and what each does, the store's
rows by stage, the holder of each lease, which actors wait for which, and the version that each engine serves.

The page's *Cluster* shows it. What does not answer in time is left out, and the run never waits.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from penstock.algorithms.graph.dataflow import Dataflow
from penstock.conf.errors import PenstockError
from penstock.orchestrator.cluster.fleet.fleet import Fleet
from penstock.orchestrator.cluster.ray_calls import answer, outcomes
from penstock.orchestrator.observability.monitoring.waits import longest_first, stages_of, waits_of
from penstock.orchestrator.run_directory.run_directory import RunDirectory
from penstock.workers.progress import SERVES, Progress

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

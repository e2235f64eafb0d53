"""Links between nodes, measured once, beside the first step: `link` events, and a line for people.

    each node's agent ─ 64 MiB or half a second ─▶ the next node's      one link after the other

Nothing waits for it. A link that cannot be measured is told, and no more.
"""

import asyncio
from itertools import pairwise

from penstock.conf.errors import PenstockError
from penstock.orchestrator.cluster.fleet.fleet import Fleet
from penstock.orchestrator.cluster.ray_calls import answer
from penstock.orchestrator.observability.reporting.progress import ProgressDisplay
from penstock.orchestrator.run_directory.run_directory import RunDirectory
from penstock.workers.node.node_agent import LINK_DEADLINE_S

LINK = "link"
"""Kind of the event, with `source` and `target`, the agents' names, and `bytes_per_s`."""
ANSWER_S = 4 * LINK_DEADLINE_S
"""Deadline of one link."""


class Links:
    """Lifecycle: `run` once; it measures when `begun` is set, and ends."""

    def __init__(self, fleet: Fleet, directory: RunDirectory, progress: ProgressDisplay) -> None:
        self._fleet, self._directory, self._progress = fleet, directory, progress
        self.begun = asyncio.Event()
        """Set when the first step begins: the start is over."""

    async def run(self) -> None:
        await self.begun.wait()
        nodes, found = self._fleet.relay_nodes, list[float]()
        with_memory = [node for node in dict.fromkeys(nodes.node_of.values()) if node in nodes.agents]
        ring = [*with_memory, *with_memory[:1]] if len(with_memory) > 1 else []
        for source, target in pairwise(ring):
            (name, agent), other = nodes.agents[source], nodes.agents[target][0]
            try:
                call = agent.measure_link.remote(nodes.addresses[target])
                rate = await answer(call, name=name, phase=f"measure the link to {other}", timeout_s=ANSWER_S)
            except PenstockError as error:
                self._directory.event("link_not_measured", source=name, target=other, error=str(error))
                continue
            found.append(rate)
            self._directory.event(LINK, source=name, target=other, bytes_per_s=round(rate))
        if found:
            self._progress.note(f"links between nodes: {min(found) / 1e9:.2g} to {max(found) / 1e9:.2g} GB/s")

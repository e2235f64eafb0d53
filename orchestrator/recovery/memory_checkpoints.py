"""Copies of the trainer's state in the memory of a second node, so that the loss of a node costs one step at most.

    each step     ranks keep copies ─▶ partners' agents fetch them ─▶ the step counts as trained
    a node lost   are_available ─▶ ranks start elsewhere ─▶ bring ─▶ they restore

`workers/node/node_transfers.py` chooses the partner of each node, and fetches copies.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from penstock.conf.errors import MemoryCheckpointError, PenstockError, WorkerDied
from penstock.orchestrator.cluster.node_agents import POLICY, StateNodes
from penstock.orchestrator.cluster.ray_calls import Kind, answers, kind_of, look, outcomes, try_all
from penstock.workers.node.node_transfers import partners

FREE_S = 10.0
"""Seconds that copies may take beyond their share: those of a run's first steps tell little."""
MAX_FAILURES = 3
"""Number of copies that fail in a row after which no more are made."""


@dataclass
class Cost:
    """The share of a run's time that copies take. Pure.

    >>> cost = Cost(most=0.1)
    >>> [cost.is_too_high(seconds=8.0, now=now) for now in (100.0, 120.0, 140.0)]
    [False, False, True]
    """

    most: float
    """Largest share of the time."""
    spent_s: float = 0.0
    """Seconds that all copies took but the first, which allocates memory as well."""
    began: float | None = None
    """Time at which the first had ended."""

    def is_too_high(self, seconds: float, now: float) -> bool:
        """Add a copy that has just ended, at `now`. Returns whether the cost is too high."""
        if self.began is None:
            self.began = now
            return False
        self.spent_s += seconds
        return self.spent_s > FREE_S + self.most * (now - self.began)

    def share(self, now: float) -> float:
        return self.spent_s / (now - self.began) if self.began is not None and now > self.began else 0.0


class MemoryCheckpoints:
    """Lifecycle: `copy` after each step that all ranks have made; `are_available` and `bring` when ranks are lost."""

    def __init__(
        self,
        look: Callable[[], StateNodes],
        max_share: float,
        timeout_s: float,
        tell: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`look`: the present nodes. `max_share`: largest share of the run's time for copies; 0: none are made.
        `timeout_s`: deadline of a copy. `tell`: called with the reason when no more are made."""
        self._look, self._timeout_s, self._tell, self._clock = look, timeout_s, tell, clock
        self._cost = Cost(max_share)
        self._is_off, self._failures = max_share == 0, 0

    async def copy(self, step: int) -> float:
        """Bring every rank's copy of a step to its partner's node. Returns the seconds. Where there is no partner, or
        copies were given up, nothing is done.

        Raises an error if a node with ranks is gone: then the step is lost, and is made again. Any other failure leaves
        this step without its second copies.
        """
        if self._is_off:
            return 0.0
        nodes = self._look()
        for rank, node in nodes.node_of_rank.items():
            if node not in nodes.agents:
                raise WorkerDied(f"The node of rank {rank} has left after step {step}, before its state was copied.")
        if not (partner_of := partners(list(nodes.agents), nodes.node_of_rank)):
            return 0.0
        began = self._clock()
        try:
            await self._fetch(nodes, step, {rank: (nodes.node_of_rank[rank], to) for rank, to in partner_of.items()})
        except PenstockError as failure:
            if not isinstance(failure, MemoryCheckpointError) and kind_of(failure) is Kind.ERROR:
                raise
            await self._check_ranks_nodes(nodes)
            self._failures += 1
            if self._failures == MAX_FAILURES:
                self._give_up(f"{failure} ")
        else:
            self._failures = 0
        now = self._clock()
        if not self._is_off and self._cost.is_too_high(now - began, now):
            self._give_up(
                f"They took {self._cost.share(now):.0%} of the time, more than faults.partner_share="
                f"{self._cost.most:g} allows. "
            )
        return now - began

    def end(self) -> None:
        """Make no more copies: ranks keep none any more."""
        self._is_off = True

    async def are_available(self, step: int) -> bool:
        """Return whether present nodes have a copy of each rank's state after a step."""
        nodes = self._look()
        holders = await self._holders(nodes, step)
        return all(holders[rank] for rank in nodes.node_of_rank)

    async def bring(self, step: int) -> None:
        """Bring the copies of a step to the nodes that the ranks are on now, and remove those of later steps. Raises
        `MemoryCheckpointError`, `DeadlineExceeded`, `WorkerDied`."""
        nodes = self._look()
        holders = await self._holders(nodes, step)
        ways = {}
        for rank, node in nodes.node_of_rank.items():
            if not holders[rank]:
                raise MemoryCheckpointError(f"no node has the copy of rank {rank} after step {step}.")
            if node not in holders[rank]:
                ways[rank] = holders[rank][0], node
        await self._fetch(nodes, step, ways)
        wanted: dict[str, set[int]] = {node: set() for node in nodes.agents}
        for of in (nodes.node_of_rank, partners(list(nodes.agents), nodes.node_of_rank)):
            for rank, node in of.items():
                wanted[node].add(rank)
        calls = [
            (name, handle.keep_only_states.remote(POLICY, sorted(wanted[node]), step))
            for node, (name, handle) in nodes.agents.items()
        ]
        await outcomes(calls, phase="remove old copies", timeout_s=self._timeout_s)

    async def _fetch(self, nodes: StateNodes, step: int, ways: Mapping[int, tuple[str, str]]) -> None:
        """Fetch copies. `ways`: source and target node, by rank."""
        ranks: dict[tuple[str, str], dict[int, int]] = defaultdict(dict)
        for rank, way in ways.items():
            ranks[way][rank] = step
        calls = []
        for (source, target), copies in ranks.items():
            name, handle = nodes.agents[target]
            calls.append((name, handle.fetch_states.remote(POLICY, copies, nodes.addresses[source])))
        await answers(calls, phase=f"copy the state after step {step}", timeout_s=self._timeout_s)

    async def _holders(self, nodes: StateNodes, step: int) -> dict[int, list[str]]:
        """Nodes that have each rank's copy of a step, by rank. A node that does not answer counts as having none."""
        agents, phase = list(nodes.agents.values()), "look for in-memory checkpoints"
        found = await try_all(agents, "memory_checkpoints", POLICY, phase=phase, timeout_s=self._timeout_s)
        holders: dict[int, list[str]] = defaultdict(list)
        for node, there in zip(nodes.agents, found, strict=True):
            for rank, steps in there.items() if not isinstance(there, Exception) else ():
                if step in steps:
                    holders[rank].append(node)
        return holders

    async def _check_ranks_nodes(self, nodes: StateNodes) -> None:
        """Raise the failure of a node with ranks that is gone."""
        for error in await look(nodes.agents[node] for node in dict.fromkeys(nodes.node_of_rank.values())):
            if error is not None:
                raise error

    def _give_up(self, why: str) -> None:
        self._is_off = True
        self._tell(
            f"No more copies of the trainer's state are made on second nodes. {why}A node with ranks that is lost is a "
            "return to the last checkpoint from now on."
        )

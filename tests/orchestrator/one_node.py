"""All of a run's actors on one node, for fleets that are none."""

from collections import defaultdict
from typing import Any

from penstock.orchestrator.nodes.weight_relays import RelayNodes


class QuietAgent:
    """Answers what the weight sync asks of an agent where nothing crosses between nodes."""

    class reclaim_versions:  # noqa: N801
        @staticmethod
        async def remote() -> None:
            pass


def on_one_node(agent: Any = QuietAgent) -> RelayNodes:
    """`agent`: its handle."""
    return RelayNodes(defaultdict(lambda: "node"), {"node": ("Agent", agent)}, {})

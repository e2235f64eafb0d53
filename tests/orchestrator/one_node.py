"""All of a run's actors on one node, for fleets that are none."""

from collections.abc import Iterator, Mapping
from typing import Any

from penstock.orchestrator.cluster.nodes.weight_relays import RelayNodes


class QuietAgent:
    """Answers what the weight sync asks of an agent where nothing crosses between nodes."""

    class reclaim_versions:  # noqa: N801
        @staticmethod
        async def remote() -> None:
            pass


class Everybody(Mapping[str, str]):
    """Is on one node, whoever is asked for."""

    def __getitem__(self, name: str) -> str:
        return "node"

    def __contains__(self, name: object) -> bool:
        return True

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def __len__(self) -> int:
        return 0


def on_one_node(agent: Any = QuietAgent) -> RelayNodes:
    """`agent`: its handle."""
    return RelayNodes(Everybody(), {"node": ("Agent", agent)}, {})

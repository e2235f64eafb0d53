"""All of a run's actors on one node, for fleets that are none."""

from collections.abc import Iterator, Mapping

from penstock.orchestrator.cluster.node_agents import RelayNodes
from tests.fakes.actors import FakeHandle


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


def on_one_node(agent: FakeHandle | None = None) -> RelayNodes:
    return RelayNodes(Everybody(), {"node": ("Agent", agent or FakeHandle())}, {})

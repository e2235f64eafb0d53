"""The node that has a second copy of each rank's kept state. Pure."""

from collections.abc import Mapping, Sequence


def partners(nodes: Sequence[str], node_of_rank: Mapping[int, str]) -> dict[int, str]:
    """The next node after each rank's own, in the order of `nodes`, which wraps around; none where there is no other.

    `nodes`: those that live, each with shared memory of its own. So each node has the copies of one other's ranks, and
    losing any one node loses no rank's state.
    """
    if len(nodes) < 2:
        return {}
    place = {node: number for number, node in enumerate(nodes)}
    return {rank: nodes[(place[node] + 1) % len(nodes)] for rank, node in node_of_rank.items()}

"""A second node for each rank's state: any one node may be lost."""

from hypothesis import given
from hypothesis import strategies as st

from penstock.workers.node.states import partners


def test_the_next_node_is_the_partner_and_the_lasts_is_the_first() -> None:
    assert partners(["a", "b", "c"], {0: "a", 1: "a", 2: "b", 3: "c"}) == {0: "b", 1: "b", 2: "c", 3: "a"}


def test_a_node_alone_has_no_partner() -> None:
    assert partners(["a"], {0: "a", 1: "a"}) == {}


@given(st.integers(2, 9), st.lists(st.integers(0, 8), max_size=20))
def test_whichever_node_is_lost_every_ranks_state_is_on_another(num_nodes: int, places: list[int]) -> None:
    nodes = [f"node-{number}" for number in range(num_nodes)]
    node_of_rank = {rank: nodes[place % num_nodes] for rank, place in enumerate(places)}
    found = partners(nodes, node_of_rank)
    assert found.keys() == node_of_rank.keys()
    assert all(found[rank] != node for rank, node in node_of_rank.items())
    assert found == partners(nodes, node_of_rank)

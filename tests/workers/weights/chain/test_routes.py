"""Chains: every receiving node is in each of them once, and nobody asks one that might ask it."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from penstock.workers.weights.chain.routes import NEARBY, Broadcast, chain, upstreams

NODES = st.lists(st.sampled_from([f"n{number}" for number in range(12)]), unique=True, min_size=1, max_size=12)


def test_the_order_turns_with_the_version_and_from_chain_to_chain() -> None:
    def orders(version: int) -> list[list[str]]:
        return [chain(Broadcast(1, version, ["a", "b", "c"], {}), ["x", "y"], source) for source in ("x", "y")]

    assert orders(12) == [["a", "b", "c"], ["b", "c", "a"]]
    assert orders(13) == [["b", "c", "a"], ["c", "a", "b"]]


def test_a_trainers_node_that_has_engines_gets_the_others_chunks_and_not_its_own() -> None:
    broadcast = Broadcast(1, 0, ["x", "a"], {})
    assert chain(broadcast, ["x", "y"], "x") == ["a"]
    assert sorted(chain(broadcast, ["x", "y"], "y")) == ["a", "x"]
    assert chain(Broadcast(1, 0, ["x"], {}), ["x"], "x") == []


@given(NODES, NODES, st.integers(0, 1000))
def test_whoever_is_asked_is_nearer_to_the_trainer(receivers: list[str], sources: list[str], version: int) -> None:
    for source in sources:
        order = chain(Broadcast(1, version, receivers, {}), sources, source)
        assert Counter(order) == Counter(set(receivers) - {source})
        for place, node in enumerate(order):
            asked = upstreams(order, source, node)
            assert asked == [*[order[place - 1 - back] for back in range(min(place, NEARBY))], source]


@given(st.integers(1, 12), st.integers(1, 4))
def test_over_the_versions_every_node_is_the_first_as_often_as_any_other(num_nodes: int, num_sources: int) -> None:
    receivers = [f"n{number:02}" for number in range(num_nodes)]
    sources = [f"x{number}" for number in range(num_sources)]
    firsts = Counter(
        chain(Broadcast(1, version, receivers, {}), sources, source)[0]
        for version in range(num_nodes)
        for source in sources
    )
    assert set(firsts.values()) == {num_sources}

from hypothesis import given
from hypothesis import strategies as st

from penstock.orchestrator.cluster.nodes.files import waves


def test_sources_double() -> None:
    assert waves(["a"], ["b", "c", "d"]) == [[("a", "b")], [("a", "c"), ("b", "d")]]
    assert waves(["a"], ["a"]) == []


@given(st.integers(1, 200))
def test_every_node_is_served_once_by_one_that_has_it(count: int) -> None:
    has = {"0"}
    planned = waves(["0"], [str(node) for node in range(count + 1)])
    for wave in planned:
        assert len({source for source, _ in wave}) == len(wave)  # one at a time each
        assert {source for source, _ in wave} <= has
        targets = {target for _, target in wave}
        assert not targets & has
        has |= targets
    assert len(has) == count + 1
    assert len(planned) == count.bit_length()  # 1, 2, 4, ... have it

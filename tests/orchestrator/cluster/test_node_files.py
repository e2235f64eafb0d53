import asyncio
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.conf.errors import WorkerDied
from penstock.orchestrator.cluster.node_agents import NodeFiles, waves


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


@pytest.mark.parametrize(
    "use",
    [
        lambda files, place: asyncio.run(files.places(place, ["gone"])),
        lambda files, place: asyncio.run(files.discard(place, {"gone": "/tmp/elsewhere"})),
        lambda files, place: files.provide(place, ["gone"]),
    ],
)
def test_a_node_that_has_left_is_a_loss_that_others_make_up_for(
    use: Callable[[NodeFiles, str], Any], tmp_path: Path
) -> None:
    """Not an error of the run's own, which would end it."""
    agents = SimpleNamespace(facts=lambda timeout_s: {}, members={})
    with pytest.raises(WorkerDied, match="Node gone has left"):
        use(NodeFiles(agents, 1.0), str(tmp_path))  # type: ignore[arg-type]

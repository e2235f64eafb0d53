"""A cluster is described in a few letters, and a GPU that nobody knows by a file."""

from pathlib import Path

import pytest

from penstock.conf.errors import ConfigError
from penstock.orchestrator.planning.hardware import KINDS, kind_of, parse_cluster
from penstock.workers.weights.publication.timing import BUSES


def test_nodes_of_several_kinds_are_read() -> None:
    found = parse_cluster("2x8:h100, 1x4:L40S")
    assert [(nodes.count, nodes.gpus, nodes.kind.name) for nodes in found] == [(2, 8, "h100"), (1, 4, "l40s")]
    assert [nodes.num_gpus for nodes in found] == [16, 4]
    assert ", ".join(map(str, found)) == "2x8:h100, 1x4:l40s"


@pytest.mark.parametrize("text", ["h100", "8:h100", "0x8:h100", "2x8", "2x8:", "axb:h100", ""])
def test_what_describes_no_nodes_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ConfigError, match="2x8:h100"):
        parse_cluster(text)


def test_an_unknown_kind_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(ConfigError, match=r"'h10' is not known.*h100.*YAML file"):
        kind_of("h10")


def test_a_kind_of_ones_own_is_a_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("{name: mine, flops: 1.0e+14, bandwidth: 1.0e+12, memory_gib: 40, link: 1.0e+10}")
    assert parse_cluster(f"1x2:{file}")[0].kind.memory_gib == 40
    file.write_text("{name: mine, speed: 3}")
    with pytest.raises(ConfigError, match="no kind of GPU can be read"):
        kind_of(str(file))


def test_each_kind_has_a_bus_that_is_known() -> None:
    assert {kind.bus for kind in KINDS.values()} <= BUSES.keys()

"""A cluster is described in a few letters, and a GPU that nobody knows by a file."""

from pathlib import Path

import pytest

from penstock.conf.errors import ConfigError
from penstock.orchestrator.planning.hardware import KINDS, GpuKind, kind_of, parse_cluster
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


EXAMPLE = """name: mine
flops: 165e12
bandwidth: 1.0e12
memory_gib: 23.5
link: 32e9
bus: PCIe 4 x16
"""


def test_numbers_of_a_file_are_read_as_people_write_them(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(EXAMPLE)
    assert kind_of(str(file)) == GpuKind("mine", 165e12, 1e12, 23.5, 32e9, "PCIe 4 x16")


@pytest.mark.parametrize(("line", "wrong", "why"), [
    ("bus: PCIe 4 x16", "bus: PCIe4", r"bus='PCIe4' is not known.*'PCIe 4 x16'"),
    ("flops: 165e12", "flops: fast", "no kind of GPU can be read from it.*fast"),
    ("flops: 165e12", "flops: -1", "flops=-1 is not a number above 0"),
    ("flops: 165e12", "flops: .nan", "flops=nan is not a number above 0"),
    ("flops: 165e12", "", "no kind of GPU can be read from it.*flops"),
    ("name: mine", "- mine", "mine.yaml"),
])  # fmt: skip
def test_a_file_with_a_fault_is_refused_with_the_fault(line: str, wrong: str, why: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(EXAMPLE.replace(line, wrong))
    with pytest.raises(ConfigError, match=why):
        kind_of(str(file))


def test_each_kind_has_a_bus_that_is_known() -> None:
    assert {kind.bus for kind in KINDS.values()} <= BUSES.keys()

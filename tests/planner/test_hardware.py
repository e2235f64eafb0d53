"""A cluster is described in a few letters, and a GPU that nobody knows by a file."""

from pathlib import Path

import pytest

from penstock.conf.errors import ConfigError
from penstock.planner.hardware import KINDS, GpuKind, kind_of, parse_cluster, with_prices
from penstock.planner.plan_inputs import kind_of_device
from penstock.workers.weights.publication.costs import BUSES


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


@pytest.mark.parametrize(("name", "kind", "gib"), [
    ("rtx4090", "rtx4090", 23.5), ("RTX_5090", "rtx5090", 31.3), ("a100-40gb", "a100-40gb", 39.4),
    ("a100-80gb", "a100", 79.1), ("A100-SXM4-80GB", "a100", 79.1), ("h100-80gb", "h100", 79.1), ("l40", "l40", 44.4),
    ("h100_sxm", "h100", 79.1), ("a10g", "a10g", 22.1), ("a6000", "a6000", 47.4), ("nvidia-rtx-a6000", "a6000", 47.4),
    ("NVIDIA GeForce RTX 4090", "rtx4090", 23.5),
])  # fmt: skip
def test_kinds_have_the_names_that_people_write(name: str, kind: str, gib: float) -> None:
    found = kind_of(name)
    assert (found.name, found.memory_gib) == (kind, gib)


@pytest.mark.parametrize(("name", "why"), [("v100", "bfloat16"), ("T4", "bfloat16"), ("mi300x", "CUDA")])
def test_a_kind_that_no_plan_is_for_is_refused_with_the_reason(name: str, why: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}.*{why}.*YAML file"):
        kind_of(name)


@pytest.mark.parametrize(("name", "gib", "kind"), [
    ("NVIDIA A100-SXM4-40GB", 39.5, "a100-40gb"), ("NVIDIA A100-SXM4-80GB", 79.2, "a100"),
    ("NVIDIA L40S", 44.5, "l40s"),
    ("NVIDIA L4", 22.0, "l4"), ("NVIDIA GeForce RTX 4090", 23.6, "rtx4090"), ("NVIDIA H100 80GB HBM3", 79.1, "h100"),
    ("NVIDIA RTX A6000", 47.5, "a6000"), ("NVIDIA GB200", 184.0, "gb200"), ("NVIDIA H200", 139.8, "h200"),
    ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 94.9, "rtx-pro-6000"), ("Tesla K80", 11.0, None),
])  # fmt: skip
def test_a_kind_is_known_by_its_drivers_name(name: str, gib: float, kind: str | None) -> None:
    found = kind_of_device(name, gib)
    assert (found and found.name) == kind


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


def test_prices_are_of_kinds_by_any_of_their_names() -> None:
    cluster = parse_cluster("2x8:h100,1x4:l40s")
    priced = with_prices(cluster, "H100-80GB=2.5, l40s=0.9")
    assert [one.kind.price for one in priced] == [2.5, 0.9]
    assert [one.num_gpus for one in priced] == [16, 4]


@pytest.mark.parametrize(
    ("text", "said"),
    [("2.5", "as in h100=2.5"), ("h100=much", "as in h100=2.5"), ("h100=2.5", "has l40s too"), ("h9=1", "'h9'")],
)
def test_prices_that_cannot_be_used_are_refused(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        with_prices(parse_cluster("2x8:h100,1x4:l40s"), text)

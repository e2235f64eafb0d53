"""Kinds of GPUs, and nodes of them: what each does in a second. Pure data, from the makers' data sheets.

    2x8:h100,1x8:l40s     two nodes of eight H100, one of eight L40S

A kind that is not here, or one of another make, is a YAML file in its place: `2x8:mine.yaml` with the fields of
`GpuKind`.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

from penstock.conf.errors import ConfigError, suggest
from penstock.orchestrator.configuration.memory_view import GPU_GIB
from penstock.orchestrator.configuration.values import plain, read_yaml
from penstock.workers.weights.publication.costs import BUSES


@dataclass(frozen=True)
class GpuKind:
    """One kind of GPU. Rates are those on paper; what is attained of them is in `cost_model.py`."""

    name: str
    flops: float
    """Products and sums a second, dense, in bfloat16."""
    bandwidth: float
    """Bytes a second between the GPU and its memory."""
    memory_gib: float
    """GiB that CUDA has."""
    link: float
    """Bytes a second in one direction to another GPU of the node: NVLink, or PCIe where there is none."""
    bus: str = "PCIe 5 x16"
    """Bus to the host: a key of `workers/weights/publication/costs.py`."""
    network: float = 50e9
    """Bytes a second in one direction from a GPU to another node."""
    ray_name: str = ""
    """Value of Ray's label for it (ray.io/accelerator-type)."""
    has_fp8: bool = True
    """True if it has products of 8 bits, at twice the rate. Without, quantised weights only take less room."""
    price: float = field(default=0.0, compare=False)
    """Money for an hour of a GPU; 0: not given."""


KINDS = {
    kind.name: kind
    for kind in (
        GpuKind("a100", 312e12, 2.039e12, 79.1, 300e9, "PCIe 4 x16", 25e9, "A100", has_fp8=False),
        GpuKind("a100-40gb", 312e12, 1.555e12, 39.4, 300e9, "PCIe 4 x16", 25e9, "A100-40G", has_fp8=False),
        GpuKind("a10g", 70e12, 0.6e12, GPU_GIB["A10G"], 32e9, "PCIe 4 x16", 12.5e9, "A10G", has_fp8=False),
        GpuKind("a6000", 155e12, 0.768e12, 47.4, 32e9, "PCIe 4 x16", 12.5e9, has_fp8=False),
        GpuKind("b200", 2250e12, 8.0e12, GPU_GIB["B200"], 900e9, ray_name="B200"),
        GpuKind("b300", 2250e12, 8.0e12, GPU_GIB["B300"], 900e9, ray_name="B300"),
        GpuKind("gb200", 2450e12, 8.0e12, 184.0, 900e9, ray_name="GB200"),
        GpuKind("h100", 989e12, 3.35e12, GPU_GIB["H100"], 450e9, ray_name="H100"),
        GpuKind("h200", 989e12, 4.8e12, GPU_GIB["H200"], 450e9, ray_name="H200"),
        GpuKind("h20", 148e12, 4.0e12, GPU_GIB["H20"], 450e9, ray_name="H20"),
        GpuKind("h800", 989e12, 3.35e12, 79.1, 200e9, ray_name="H800"),
        GpuKind("l4", 121e12, 0.3e12, GPU_GIB["L4"], 32e9, "PCIe 4 x16", 12.5e9, "L4"),
        GpuKind("l40", 181e12, 0.864e12, 44.4, 32e9, "PCIe 4 x16", 25e9),
        GpuKind("l40s", 362e12, 0.864e12, GPU_GIB["L40S"], 32e9, "PCIe 4 x16", 25e9, "L40S"),
        GpuKind("rtx4090", 165e12, 1.008e12, 23.5, 32e9, "PCIe 4 x16", 12.5e9),
        GpuKind("rtx5090", 209e12, 1.792e12, 31.3, 64e9, network=12.5e9),
        GpuKind("rtx-pro-6000", 503e12, 1.597e12, GPU_GIB["RTX-PRO-6000"], 64e9, ray_name="RTX-PRO-6000"),
    )
}
"""Kinds by name. `network`: 400 Gbit/s a GPU, 200 with A100, L40 and L40S, 100 with the smaller ones, as clouds sell
them."""
ALIASES = {"a100-80gb": "a100", "h100-80gb": "h100", "h200-141gb": "h200", "rtx-a6000": "a6000",
           "rtx6000-pro": "rtx-pro-6000"}  # fmt: skip
"""Names of kinds that are known by another."""
UNFIT = {
    "v100": "it computes no bfloat16, with which plans are made",
    "t4": "it computes no bfloat16, with which plans are made",
    "mi300x": "the locked builds of torch and vLLM are those for CUDA",
}
"""Kinds that no plan is made for, and why."""


@dataclass(frozen=True)
class Nodes:
    """Nodes of one kind."""

    count: int
    gpus: int
    """GPUs of each."""
    kind: GpuKind
    host_bytes: float = math.inf
    """Host memory of each; infinite where unknown."""

    @property
    def num_gpus(self) -> int:
        return self.count * self.gpus

    def __str__(self) -> str:
        return f"{self.count}x{self.gpus}:{self.kind.name}"


def parse_cluster(text: str) -> tuple[Nodes, ...]:
    """The nodes that a text describes. Raises `ConfigError`."""
    found: dict[tuple[int, GpuKind], int] = {}
    for part in text.split(","):
        shape, _, name = part.strip().partition(":")
        numbers = shape.split("x")
        if len(numbers) != 2 or not all(number.isdigit() and int(number) for number in numbers) or not name:
            raise ConfigError(
                f"--cluster {text!r}: {part.strip()!r} does not say nodes, GPUs of each, and their kind. Write it "
                "as in 2x8:h100, or as in 1x8:h100,2x8:l40s for several kinds."
            )
        like = int(numbers[1]), kind_of(name)
        found[like] = found.get(like, 0) + int(numbers[0])
    return tuple(Nodes(count, gpus, kind) for (gpus, kind), count in found.items())


def with_prices(cluster: Sequence[Nodes], text: str) -> tuple[Nodes, ...]:
    """The nodes with the money for an hour of a GPU, as in `h100=2.5,l40s=0.9`. Raises `ConfigError` for a text that is
    not like this, and for a kind of GPU that has no price then."""
    prices = dict[str, float]()
    for part in text.split(","):
        name, _, price = part.strip().rpartition("=")
        if not name or not price.replace(".", "", 1).isdigit():
            raise ConfigError(f"--price {text!r}: write what an hour of a GPU costs, as in h100=2.5,l40s=0.9.")
        prices[kind_of(name).name] = float(price)
    priced = tuple(
        replace(one, kind=replace(one.kind, price=prices.get(one.kind.name, one.kind.price))) for one in cluster
    )
    if missing := [one.kind.name for one in priced if not one.kind.price]:
        raise ConfigError(f"--price {text!r}: the cluster has {', '.join(missing)} too. Give {missing[0]}=…")
    return priced


def kind_of(name: str) -> GpuKind:
    """The kind of a name, or of a YAML file. Raises `ConfigError`."""
    if name.endswith((".yaml", ".yml")):
        return _read(Path(name))
    own = re.sub(r"^(nvidia-)?(geforce-)?|-(sxm|pcie)\d?(?=-|$)", "", name.lower().replace("_", "-").replace(" ", "-"))
    own = ALIASES.get(own, own).replace("rtx-4090", "rtx4090").replace("rtx-5090", "rtx5090")
    figures = f"Name a YAML file with its figures: {', '.join(one.name for one in fields(GpuKind))}."
    if own in UNFIT:
        raise ConfigError(f"GPU {name!r}: {UNFIT[own]}. {figures}")
    if own not in KINDS:
        raise ConfigError(f"GPU {name!r} is not known{suggest(own, list(KINDS))} {figures}")
    return KINDS[own]


def _read(file: Path) -> GpuKind:
    try:
        values = plain(read_yaml(file))
        rates = [one.name for one in fields(GpuKind) if one.type is float and one.name in values]
        kind = GpuKind(**{**values, **{name: float(values[name]) for name in rates}})
    except (OSError, TypeError, ValueError) as error:
        names = ", ".join(one.name for one in fields(GpuKind))
        raise ConfigError(f"{file}: no kind of GPU can be read from it ({error}). It has the fields {names}.") from None
    for name in rates:
        if not 0 < getattr(kind, name) < math.inf:
            raise ConfigError(f"{file}: {name}={values[name]} is not a number above 0.")
    if kind.bus not in BUSES:
        raise ConfigError(f"{file}: bus={kind.bus!r} is not known. Write one of {', '.join(map(repr, BUSES))}.")
    return kind

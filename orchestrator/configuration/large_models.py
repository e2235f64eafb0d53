"""Models that are too large for CPUs. The zeros of a preset, such as `tiny`, and of defaults are for small models: with
another `model.path` of more than a billion parameters they count as not given, and the keys of presets for GPUs stand
in their place, so that `plan=auto` decides where GPUs are. Zeros that were typed, or are a recipe's own, are refused
there.

Sizes are read from config.json, in a directory or the hub's cache; else the name of a model of the hub tells its size.
"""

import math
import re
from collections.abc import Collection, Mapping
from operator import attrgetter
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from penstock.conf.errors import ConfigError
from penstock.conf.model import ON_GPU
from penstock.conf.run import RunConfig
from penstock.orchestrator.configuration.model_shape import ModelShape, read_config

LARGE = 1e9
"""Parameters above which a model is not computed on CPUs by itself: with its states 16 GB, and minutes a step."""
GPUS = ("rollout.num_gpus_per_worker", "trainer.num_gpus_per_rank")
SIZE = re.compile(r"(?:^|[-_])(?:(\d+)x)?(\d+(?:\.\d+)?)b(?=$|[-_])", re.IGNORECASE)
"""Size in a name, in billions: Qwen3-30B-A3B, Mixtral-8x7B."""


def count_parameters(path: str, directory: Path = Path()) -> float | None:
    """Parameters of a model; None: not known. `directory`: searched after the working directory."""
    places = (Path(path).expanduser(), directory / path)
    here = next((str(place) for place in places if place.is_dir()), path)
    values = read_config(here)
    shape = ModelShape.of(values) if values is not None else None
    if shape is not None:
        return float(shape.num_parameters)
    is_of_hub = not (Path(here).is_dir() or path.startswith((".", "/", "~")) or path.count("/") > 1)
    found = SIZE.search(path.rpartition("/")[2]) if is_of_hub else None
    return None if found is None else math.prod(float(part) for part in found.groups(default="1")) * 1e9


def use_gpus(tree: DictConfig, written: Mapping[str, Any], typed: Collection[str]) -> None:
    """Set the keys of presets for GPUs that neither `written`, a recipe's values, nor `typed` have; half a GPU where
    engines and ranks share them."""
    for section, values in ON_GPU.items():
        for name, value in values.items():
            key = f"{section}.{name}"
            if name not in (written.get(section) or {}) and key not in typed:
                OmegaConf.update(tree, key, 0.5 if key in GPUS and tree.placement == "colocated" else value)


def refuse_cpus(config: RunConfig, num_parameters: float) -> None:
    """Raise `ConfigError` for a large model whose engines or ranks have no GPU, unless `plan=never` means it."""
    zeros = [key for key in GPUS if not attrgetter(key)(config)]
    if zeros and config.plan == "auto":
        raise ConfigError(
            f"model.path={config.model.path}: a model of {num_parameters / 1e9:.1f}B parameters is too large for CPUs, "
            f"and {' and '.join(f'{key}=0' for key in zeros)} asks for them: leave that out, and plan=auto finds GPUs, "
            "or add plan=never where CPUs are meant."
        )

"""The configurations of algorithms, by name: a file for each kind, and here what there is."""

import sys

from penstock.conf.algorithms import base, policy_gradient, preference
from penstock.conf.algorithms.base import AlgorithmConfig


def known_algorithms() -> dict[str, type[AlgorithmConfig]]:
    """Configuration classes of the algorithms in `algorithms/catalogue.py`, by name. Penstock's own are known by their
    dataclass: the catalogue would import torch, and neither a wrong key nor a report should take seconds. A user's file
    has imported the registry by now."""
    known = {
        cls.name: cls
        for module in (base, policy_gradient, preference)
        for cls in vars(module).values()
        if isinstance(cls, type) and issubclass(cls, AlgorithmConfig) and cls is not AlgorithmConfig
    }
    registry = sys.modules.get("penstock.algorithms.registry")
    return known | {name: entry.config_class for name, entry in (registry.ALGORITHMS if registry else {}).items()}

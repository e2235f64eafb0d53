"""What of a configuration is not as the defaults have it: what a person wants to see of it."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from penstock.conf.algorithms import base
from penstock.conf.algorithms.base import AlgorithmConfig
from penstock.conf.run import RunConfig


def differences_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a resolved config.yaml that differ from the defaults. The algorithm's name is always among them."""
    algorithm = config.get("algorithm") or {}
    defaults = asdict(RunConfig()) | {"algorithm": _algorithm_defaults(str(algorithm.get("name")))}
    changed = _changed(config, defaults)
    if "name" in algorithm:
        changed["algorithm"] = {"name": algorithm["name"], **changed.get("algorithm", {})}
    return changed


def _algorithm_defaults(name: str) -> dict[str, Any]:
    for cls in vars(base).values():
        if isinstance(cls, type) and issubclass(cls, AlgorithmConfig) and cls.name == name:
            return asdict(cls())
    return {}


def _changed(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in values.items():
        usual = defaults.get(key)
        if isinstance(value, Mapping) and isinstance(usual, Mapping) and usual:
            inner = _changed(value, usual)
            if inner:
                result[key] = inner
        elif key not in defaults or value != usual:
            result[key] = value
    return result

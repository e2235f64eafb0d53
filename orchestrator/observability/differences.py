"""Differences of configurations, which are what a person wants to see: from the defaults, and between several runs."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any, cast

from omegaconf import OmegaConf

from penstock.conf.algorithms import known_algorithms
from penstock.conf.run import RunConfig
from penstock.conf.trainer import PolicyConfig
from penstock.orchestrator.run_directory.json_lines import json_of


def differences_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a resolved config.yaml that differ from the defaults. The algorithm's name is always among them."""
    found = config.get("algorithm")
    algorithm = found if isinstance(found, Mapping) else {}
    defaults = asdict(RunConfig()) | {"algorithm": _algorithm_defaults(str(algorithm.get("name")))}
    trainer = config.get("trainer")
    policies = trainer.get("policies") if isinstance(trainer, Mapping) else None
    if isinstance(policies, Mapping):
        defaults["trainer"]["policies"] = dict.fromkeys(policies, asdict(PolicyConfig()))
    changed = _changed(config, defaults)
    if "name" in algorithm:
        changed["algorithm"] = {"name": algorithm["name"], **changed.get("algorithm", {})}
    return changed


def differing(configs: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Differences of several runs' configurations: each run's value, by key. `name` and places are no difference."""
    settings = {run: dict(flat(config)) for run, config in configs.items()}
    keys = dict.fromkeys(key for values in settings.values() for key in values if key not in ("name", "output_dir"))
    rows = {key: {run: values.get(key) for run, values in settings.items()} for key in keys}
    return {key: row for key, row in rows.items() if len({json_of(value) for value in row.values()}) > 1}


def _algorithm_defaults(name: str) -> dict[str, Any]:
    """Defaults of an algorithm; empty if it is not known here: a user's own, in a report of a run of another
    process."""
    config_class = known_algorithms().get(name)
    if config_class is None:
        return {}
    values = OmegaConf.to_container(OmegaConf.structured(config_class))  # makes no object, which may want a key set
    return cast(dict[str, Any], values)


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


def flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Flatten a configuration: each value with its dotted key.

    >>> list(flat({"seed": 1, "trainer": {"optimizer": {"lr": 0.1}}}))
    [('seed', 1), ('trainer.optimizer.lr', 0.1)]
    """
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value

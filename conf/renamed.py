"""Keys, public names and Prometheus metrics that have been renamed. The old one is taken for two minor versions more
(docs/stability.md): a key or a name with a warning, a metric by a rule of `penstock grafana`."""

import logging
import warnings
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

_LOG = logging.getLogger("penstock")


@dataclass(frozen=True)
class NewName:
    """The present name of something, and until when its old one is taken."""

    name: str
    until: str
    """First version that refuses the old name."""


KEYS: dict[str, NewName] = {}
"""Keys of the configuration by their old names, {trainer.groups: NewName(trainer.groups_per_step, 0.4)}."""
NAMES: dict[str, NewName] = {}
"""Names of `import penstock` by their old ones."""
METRICS: dict[str, NewName] = {
    "penstock_trainer_step_phase_seconds_sum": NewName("penstock_trainer_step_phase_seconds_total", "0.4"),
    "penstock_store_lease_wait_seconds_sum": NewName("penstock_store_lease_wait_seconds_total", "0.4"),
    "penstock_trainer_mismatch_nats": NewName("penstock_step_mismatch_logprob_abs_mean", "0.4"),
}
"""Series of Prometheus by their old names."""


def present_key(key: str) -> str:
    """The present name of a key that a user has written. Warns about an old name."""
    found = KEYS.get(key)
    if found is None:
        return key
    _LOG.warning("%s is called %s now. Rename it: version %s refuses the old name.", key, found.name, found.until)
    return found.name


def present_values(values: dict[str, Any]) -> dict[str, Any]:
    """The nested values of a recipe, with old keys by their present names. A value by the present name wins."""
    found = deepcopy(values)
    for key in KEYS:
        *sections, name = key.split(".")
        node: Any = found
        for section in sections:
            node = node.get(section) if isinstance(node, dict) else None
        if isinstance(node, dict) and name in node:
            _put(found, present_key(key).split("."), node.pop(name))
    return found


def present_name(name: str) -> str | None:
    """The present name of a public name of the package, where it is an old one; using it is a `DeprecationWarning`."""
    found = NAMES.get(name)
    if found is None:
        return None
    text = f"penstock.{name} is called {found.name} now: version {found.until} refuses the old name."
    warnings.warn(text, DeprecationWarning, stacklevel=3)
    return found.name


def _put(values: dict[str, Any], path: list[str], value: Any) -> None:
    for part in path[:-1]:
        values = values.setdefault(part, {})
    values.setdefault(path[-1], value)

"""Checks of numbers, names and installed packages: each failure names its key, or the extra to install."""

import json
import math
from collections.abc import Collection, Mapping
from dataclasses import fields, is_dataclass
from importlib.util import find_spec
from typing import Any

from penstock.conf.errors import ConfigError, suggest

AUTO = "auto"
"""Value of a key for what the run itself finds."""

EXTRAS: Mapping[str, Collection[str]] = {
    "serve": ("starlette", "uvicorn", "tinker", "zstandard"),
    "ui": ("starlette", "sse_starlette", "uvicorn", "grafana_foundation_sdk"),
    "vllm": ("vllm",),
    "deepspeed": ("deepspeed",),
}
"""Modules that an extra of pyproject.toml brings, and that something cannot do without, by the extra."""

POSITIVE = "positive"
"""Bound of a field that must be greater than 0."""


def _is_open(value: object) -> bool:
    """Return True for `???` and `${...}`, which Hydra leaves in a dataclass until it is resolved: nothing to check
    yet."""
    return isinstance(value, str) and (value == "???" or value.startswith("${"))


def auto_or_number(key: str, value: Any) -> bool:
    """Return whether a value is `auto`, or not known yet. Raises `ConfigError` for another text."""
    if isinstance(value, str) and value != AUTO and not _is_open(value):
        raise ConfigError(f"{key}={value}: must be a number, or {AUTO}.")
    return isinstance(value, str)


def at_least(key: str, value: Any, low: float) -> None:
    if not _is_open(value) and not value >= low:
        raise ConfigError(f"{key}={value}: must be at least {low}.")


def above(key: str, value: Any, low: float) -> None:
    if not _is_open(value) and not value > low:
        raise ConfigError(f"{key}={value}: must be greater than {low}.")


def within(key: str, value: Any, low: float, high: float) -> None:
    if not _is_open(value) and not low <= value <= high:
        raise ConfigError(f"{key}={value}: must lie between {low} and {high}.")


def check_bounds(section: object, name: str, /, **bounds: float | str | tuple[float, float]) -> None:
    """Check fields of a section that is called `name`: against the least value, `POSITIVE`, or the least and the
    largest. A field that is `null` has no bound."""
    for field, bound in bounds.items():
        key, value = f"{name}.{field}", getattr(section, field)
        if value is None:
            continue
        if isinstance(bound, tuple):
            within(key, value, *bound)
        elif isinstance(bound, str):
            above(key, value, 0)
        else:
            at_least(key, value, bound)


def one_of(key: str, value: str, names: Collection[str]) -> None:
    if not _is_open(value) and value not in names:
        raise ConfigError(f"{key}={value}: unknown{suggest(value, names)}")


def check_numbers(value: Any, key: str = "") -> None:
    """Check every number of a dataclass and of those in it: finite, and a whole one within 64 bits."""
    if is_dataclass(value):
        for field in fields(value):
            check_numbers(getattr(value, field.name), f"{key}.{field.name}" if key else field.name)
    elif isinstance(value, list):
        for place, one in enumerate(value):
            check_numbers(one, f"{key}.{place}")
    elif isinstance(value, dict):
        for name, one in value.items():
            if is_dataclass(one):  # any other is the user's own
                check_numbers(one, f"{key}.{name}")
    elif isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{key}={value}: must be a finite number.")
    elif isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise ConfigError(f"{key}={value}: must be a number of 64 bits, at most {2**63 - 1}.")


def is_utf8(value: Any) -> bool:
    """Return whether a value's texts can be encoded, as JSON. A lone surrogate cannot."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except (TypeError, ValueError, RecursionError):
        return False
    return True


def divides(key: str, value: Any, whole_key: str, whole: Any) -> None:
    if not _is_open(value) and not _is_open(whole) and whole % value:
        raise ConfigError(f"{key}={value}: must divide {whole_key}={whole}.")


def need_extra(extra: str, what: str) -> None:
    """Raise `ConfigError` if a module of an extra is not installed. `what`: the command or the setting that needs
    it."""
    missing = [module for module in EXTRAS[extra] if find_spec(module) is None]
    if missing:
        raise ConfigError(
            f"{what} needs {' and '.join(missing)}, which is not installed here: pip install 'penstock[{extra}]'."
        )

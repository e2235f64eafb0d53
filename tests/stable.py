"""What a release promises to keep (docs/stability.md): public names with their parameters, keys, commands with their
options, Prometheus metrics, exit codes.

    python -m tests.stable > tests/stable.json     # at a release, and at no other time
"""

import argparse
import inspect
import json
from typing import Any

import penstock
from penstock.cli.main import make_parser
from penstock.conf import errors
from penstock.metering import table
from penstock.metering.meters import Metric
from penstock.orchestrator.configuration.keys import sections

GIVEN = ("Context",)
"""Classes whose objects users are given and do not make: their constructors are not promised."""


def present() -> dict[str, Any]:
    """All of it as it is now."""
    return {
        "names": {name: _parameters(getattr(penstock, name)) for name in penstock.__all__ if name not in GIVEN},
        "keys": sorted(key.name for section in sections() for key in section.keys),
        "commands": {name: sorted(_options(parser)) for name, parser in _commands().items()},
        "metrics": sorted(one.name for one in vars(table).values() if isinstance(one, Metric)),
        "exit_codes": {
            name: kind.exit_code
            for name, kind in sorted(vars(errors).items())
            if isinstance(kind, type) and issubclass(kind, errors.PenstockError)
        },
    }


def _parameters(value: Any) -> list[str]:
    try:
        found = inspect.signature(value).parameters
    except (TypeError, ValueError):
        return []
    return [name for name in found if name not in ("self", "cls", "args", "kwargs")]


def _commands() -> dict[str, argparse.ArgumentParser]:
    for action in make_parser()._actions:
        if isinstance(action, argparse._SubParsersAction):
            return dict(action.choices)
    return {}


def _options(parser: argparse.ArgumentParser) -> list[str]:
    return [option for action in parser._actions for option in action.option_strings if option.startswith("--")]


if __name__ == "__main__":
    print(json.dumps(present(), indent=1))

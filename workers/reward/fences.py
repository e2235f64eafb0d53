"""The sandboxes of a reward process: one for each set of limits, kept ready between samples.

A sandbox ends with its process, also when the pool kills that.
"""

import functools
import re
from collections.abc import Mapping
from typing import Any

from penstock.conf.environment import SandboxConfig
from penstock.conf.errors import ConfigError, suggest
from penstock.workers.sandbox.blocking import BlockingSandbox
from penstock.workers.sandbox.limits import Limits

BUDGET_S = 8.0
"""Seconds for all executions of a response. Less than `reward.timeout_s` (10 s), at which the pool would drop the
sample instead of scoring it 0."""


def sandbox(limits: Mapping[str, Any] | None = None) -> BlockingSandbox:
    """The sandbox with these limits. `limits`: keys of `SandboxConfig`. Raises `ConfigError`."""
    return _sandbox(limits_of(limits))


_sandbox = functools.cache(BlockingSandbox)


def limits_of(limits: Mapping[str, Any] | None) -> Limits:
    """The limits that a reward's option means. Raises `ConfigError`."""
    known = SandboxConfig.__dataclass_fields__
    for key in limits or {}:
        if key not in known:
            raise ConfigError(f"reward.options.limits.{key}: the sandbox has no such limit{suggest(key, known)}")
    try:
        return Limits.of(SandboxConfig(**(limits or {})))
    except TypeError as error:
        raise ConfigError(
            f"reward.options.limits={limits}: {error}. Limits are numbers (conf/environment.py)."
        ) from None


def warm(options: Mapping[str, Any]) -> None:
    """Start the sandbox before the first sample's deadline begins. Raises `SandboxUnavailable`, `ConfigError`."""
    sandbox(options.get("limits")).start()


FENCE = re.compile(r"^[ \t]*```[ \t]*(\w*)[^\n]*\n(.*?)(?:^[ \t]*```|\Z)", re.MULTILINE | re.DOTALL)


def last_block(response: str, languages: tuple[str, ...]) -> str:
    """The last block of a response that is fenced by ``` and labelled with one of the languages; else the whole text.
    A block that is not closed goes on to the end."""
    blocks = [text for label, text in FENCE.findall(response) if label.lower() in languages]
    return blocks[-1] if blocks else response

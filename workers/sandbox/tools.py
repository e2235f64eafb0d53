"""Tools that an agent may call: plain async functions with types and a docstring."""

import asyncio
import atexit
import math
import os
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from penstock.workers.contained import TookTooLong
from penstock.workers.sandbox.execution import Limits, Outcome
from penstock.workers.sandbox.sandbox import Sandbox

MAX_CHARACTERS = 8_000
"""Largest number of characters that a tool returns: a model pays for each of them."""
_sandboxes: dict[tuple[asyncio.AbstractEventLoop, Limits], Sandbox] = {}


async def python(code: str) -> str:
    """Run a Python program and return what it prints.

    The program runs alone: without network, packages or files of earlier runs, for at most ten seconds.

    Args:
        code: The whole program. Only what it prints is returned.
    """
    return await _python_within(math.inf, Limits(), code)


async def _python_within(timeout_s: float, limits: Limits, code: str) -> str:
    sandbox = _sandbox(limits)
    outcome = await sandbox.run_python(code, wall_s=timeout_s)
    if outcome.reason == "timeout_wall" and timeout_s < sandbox.limits.wall_s:
        raise TookTooLong(f"it took longer than {timeout_s:g} s")
    return said(outcome)


TIMED: Mapping[Any, Callable[..., Awaitable[Any]]] = {python: _python_within}
"""Variants of tools that wait for their turn. Before a tool's own arguments, they take the seconds that it may run from
then on and the limits of code. They raise `TookTooLong`."""


def _sandbox(limits: Limits) -> Sandbox:
    """The sandbox of this event loop, with a worker a core. Sandboxes of loops that are closed are closed, too."""
    for key in [key for key in _sandboxes if key[0].is_closed()]:
        _sandboxes.pop(key).close()
    key = asyncio.get_running_loop(), limits
    if key not in _sandboxes:
        _sandboxes[key] = Sandbox(limits, num_workers=os.cpu_count() or 1)
    return _sandboxes[key]


@atexit.register
def _close() -> None:
    for sandbox in _sandboxes.values():
        sandbox.close()


def said(outcome: Outcome) -> str:
    """The text of an outcome: standard output, then standard error, then how it ended if not well; at most
    `MAX_CHARACTERS`, cut in the middle."""
    parts = [outcome.stdout.rstrip("\n"), outcome.stderr.rstrip("\n")]
    if outcome.reason != "exited":
        parts.append(f"[ended: {outcome.reason}]")
    elif outcome.exit_code:
        parts.append(f"[exit code {outcome.exit_code}]")
    text = "\n".join(part for part in parts if part)
    more = len(text) - MAX_CHARACTERS
    half = MAX_CHARACTERS // 2 - 20
    return text if more <= 0 else f"{text[:half]}\n[… {len(text) - 2 * half} more …]\n{text[-half:]}"

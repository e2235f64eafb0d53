"""What an agent may call: plain async functions with types and a docstring, for whoever registers tools."""

import asyncio
import weakref

from penstock.workers.sandbox.outcome import Outcome
from penstock.workers.sandbox.sandbox import Sandbox

MAX_CHARACTERS = 8_000
"""Of what a tool returns: a model pays for each of them."""
_sandboxes: "weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Sandbox]" = weakref.WeakKeyDictionary()


async def python(code: str) -> str:
    """Run a Python program and return what it prints.

    The program runs alone: without network, packages or files of earlier runs, for at most ten seconds.

    Args:
        code: The whole program. Only what it prints is returned.
    """
    loop = asyncio.get_running_loop()
    if loop not in _sandboxes:
        _sandboxes[loop] = Sandbox()
    return said(await _sandboxes[loop].run_python(code))


def said(outcome: Outcome) -> str:
    """Standard output, then standard error, then how it ended if not well; at most `MAX_CHARACTERS`, cut in the
    middle."""
    parts = [outcome.stdout.rstrip("\n"), outcome.stderr.rstrip("\n")]
    if outcome.reason != "exited":
        parts.append(f"[ended: {outcome.reason}]")
    elif outcome.exit_code:
        parts.append(f"[exit code {outcome.exit_code}]")
    text = "\n".join(part for part in parts if part)
    more = len(text) - MAX_CHARACTERS
    half = MAX_CHARACTERS // 2 - 20
    return text if more <= 0 else f"{text[:half]}\n[… {len(text) - 2 * half} more …]\n{text[-half:]}"

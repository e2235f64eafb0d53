"""The outcome of an execution, decided from what the fence's keeper measured. Pure.

Nothing here judges the code: the caller does that, by comparing data with data (`data.py`).
"""

import json
import os
import signal
from dataclasses import dataclass
from typing import Any

from penstock.conf.errors import NotPlainData
from penstock.workers.sandbox.data import parse
from penstock.workers.sandbox.limits import Limits

MAX_TEXT = 2_000
"""Largest number of characters of a failure's text, which quotes the code's own output."""
CPU_SLACK_S = 0.25
"""Seconds by which the counted time may be below the limit: the kernel ends a process within a tick of its limit, and
counts a little less than that."""


@dataclass(frozen=True)
class Outcome:
    """The way a program ended."""

    stdout: str
    stderr: str
    """Output and errors, each at most `Limits.output_bytes` of UTF-8; other bytes are replaced."""
    exit_code: int
    """Exit code; -N: ended by signal N."""
    seconds: float
    """Wall-clock seconds, from the fork to the end of its last process."""
    cpu_s: float
    """Processor time of all its processes, and of the keeper on their behalf (about 2 ms)."""
    reason: str
    """Reason: "exited"; "timeout_cpu", "timeout_wall", "memory", "output": over this limit; "signal": a crash; "lost":
    the fence went down with it."""

    @property
    def is_success(self) -> bool:
        return self.reason == "exited" and self.exit_code == 0


@dataclass(frozen=True)
class Value:
    """The value that a call returned: None, bool, int, finite float, str, list, or dict with str keys."""

    data: Any


@dataclass(frozen=True)
class Failed:
    """The reason why a call returned nothing."""

    reason: str
    """Reason: "raised", "not_data", "unready" (the code itself raised before any call), or a reason of `Outcome`;
    "exited": the code ended its process."""
    text: str = ""


Result = Value | Failed


@dataclass(frozen=True)
class Ending:
    """The facts on an execution that is over: the keeper's figures and the files that it has filled."""

    status: int
    """Status in the form of `os.wait4`."""
    in_time: bool
    cpu_s: float
    seconds: float
    out_of_memory: bool = False
    lost: bool = False
    """True if the fence went down, and no process saw the execution end."""
    stdout: bytes = b""
    stderr: bytes = b""
    answer: bytes = b""
    """Output, errors and answer, each at most one byte more than `Limits.output_bytes`."""


def reason_of(ending: Ending, limits: Limits) -> str:
    """The limit that was passed, if any; else how the process ended."""
    if ending.out_of_memory:
        return "memory"
    if not ending.in_time:
        return "timeout_wall"
    was_killed = os.WIFSIGNALED(ending.status) and os.WTERMSIG(ending.status) == signal.SIGKILL
    if ending.cpu_s > limits.cpu_s - (CPU_SLACK_S if was_killed and not ending.lost else 0.0):
        return "timeout_cpu"
    if ending.lost:
        return "lost"
    if max(map(len, (ending.stdout, ending.stderr, ending.answer))) > limits.output_bytes:
        return "output"
    if os.WIFSIGNALED(ending.status):
        return "signal"
    return "exited"


def outcome_of(ending: Ending, limits: Limits) -> Outcome:
    reason = reason_of(ending, limits)
    if reason == "exited" and ending.answer.startswith(b'["memory"'):
        reason = "memory"  # its own word, and to nobody's harm but its own
    return Outcome(
        stdout=_text(ending.stdout, limits),
        stderr=_text(ending.stderr, limits),
        exit_code=os.waitstatus_to_exitcode(ending.status),
        seconds=ending.seconds,
        cpu_s=ending.cpu_s,
        reason=reason,
    )


def results_of(ending: Ending, num_calls: int, limits: Limits) -> list[Result]:
    """Results of calls, one for each. Calls that were not reached fail for the reason that the process ended."""
    reason = reason_of(ending, limits)
    if reason == "output":
        return [Failed("output", f"more than {limits.output_bytes:,} bytes")] * num_calls
    results: list[Result] = []
    for line in ending.answer.split(b"\n")[:-1][:num_calls]:
        results.append(_result(line))
        if isinstance(results[-1], Failed) and results[-1].reason == "unready":
            return [results[-1]] * num_calls
    text = ending.stderr[-MAX_TEXT:].decode(errors="replace")
    return results + [Failed(reason, text)] * (num_calls - len(results))


def _result(line: bytes) -> Result:
    """The meaning of a line, which the code itself may have written."""
    try:
        said = parse(line)
    except NotPlainData as error:
        return Failed("not_data", str(error))
    match said:
        case ["value", data]:
            return Value(data)
        case ["raised" | "not_data" | "unready" as kind, str(text)]:
            return Failed(kind, text[:MAX_TEXT])
    return Failed("not_data", f"the code wrote {json.dumps(said)[:80]} where a result is due")


def _text(output: bytes, limits: Limits) -> str:
    return output[: limits.output_bytes].decode(errors="replace")

"""An execution as its caller sees it: its limits, its outcome, and the data that the code returned. Pure.

    Limits ─▶ worker, keeper ─▶ Ending ─▶ outcome_of ─▶ ProgramOutcome   of a program
                                       ─▶ results_of ─▶ Value, Failed    of each call

The outcome is decided from what the fence's keeper measured. Nothing here judges the code: the caller does that, by
comparing data with data (`same`), outside the fence. Data is JSON and nothing else: None, bool, int, finite float, str,
list, dict with str keys. Tuples come as lists.
"""

import json
import math
import os
import signal
from dataclasses import dataclass
from typing import Any

from penstock.conf.environment import SandboxConfig
from penstock.conf.errors import NotPlainData

MIB = 1 << 20
MAX_TEXT = 2_000
"""Largest number of characters of a failure's text, which quotes the code's own output."""
CPU_SLACK_S = 0.25
"""Seconds by which the counted time may be below the limit: the kernel ends a process within a tick of its limit, and
counts a little less than that."""


@dataclass(frozen=True)
class Limits:
    """Limits of one execution, in seconds and bytes. Plain data, which also the program inside the fence reads.
    The defaults, with the reasons for them, are those of `conf/environment.py`."""

    cpu_s: float = SandboxConfig.cpu_s
    wall_s: float = SandboxConfig.wall_s
    memory_bytes: int = SandboxConfig.memory_mib * MIB
    num_processes: int = SandboxConfig.num_processes
    file_bytes: int = SandboxConfig.file_mib * MIB
    tmp_bytes: int = SandboxConfig.tmp_mib * MIB
    tmp_files: int = SandboxConfig.tmp_files
    output_bytes: int = int(SandboxConfig.output_mib * MIB)
    require_cgroup: bool = SandboxConfig.require_cgroup

    @classmethod
    def of(cls, config: SandboxConfig) -> "Limits":
        return cls(
            config.cpu_s, config.wall_s, config.memory_mib * MIB, config.num_processes, config.file_mib * MIB,
            config.tmp_mib * MIB, config.tmp_files, int(config.output_mib * MIB), config.require_cgroup,
        )  # fmt: skip


@dataclass(frozen=True)
class ProgramOutcome:
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
    """Reason: "exited"; "timeout_cpu", "timeout_wall", "memory", "output": over this limit; "disk": over a workspace's
    limits on its disk, or that is nearly full; "signal": a crash; "lost": the fence went down with it."""

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
    """Reason: "raised", "not_data", "unready" (the code itself raised before any call), or a reason of
    `ProgramOutcome`; "exited": the code ended its process."""
    text: str = ""


CallResult = Value | Failed
"""The result of one call of a function of the code."""


@dataclass(frozen=True)
class Ending:
    """The facts on an execution that is over: the keeper's figures and the files that it has filled."""

    status: int
    """Status in the form of `os.wait4`."""
    in_time: bool
    cpu_s: float
    seconds: float
    out_of_memory: bool = False
    over_disk: bool = False
    """True if what was changed takes more of its disk than it may."""
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
    if ending.over_disk:
        return "disk"
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


def outcome_of(ending: Ending, limits: Limits) -> ProgramOutcome:
    reason = reason_of(ending, limits)
    if reason == "exited" and ending.answer.startswith(b'["memory"'):
        reason = "memory"  # the program reports it itself; a false report harms only the program
    return ProgramOutcome(
        stdout=_text(ending.stdout, limits),
        stderr=_text(ending.stderr, limits),
        exit_code=os.waitstatus_to_exitcode(ending.status),
        seconds=ending.seconds,
        cpu_s=ending.cpu_s,
        reason=reason,
    )


def results_of(ending: Ending, num_calls: int, limits: Limits) -> list[CallResult]:
    """Results of calls, one for each. Calls that were not reached fail for the reason that the process ended."""
    reason = reason_of(ending, limits)
    if reason == "output":
        return [Failed("output", f"more than {limits.output_bytes:,} bytes")] * num_calls
    results: list[CallResult] = []
    for line in ending.answer.split(b"\n")[:-1][:num_calls]:
        results.append(_result(line))
        if isinstance(results[-1], Failed) and results[-1].reason == "unready":
            return [results[-1]] * num_calls
    text = ending.stderr[-MAX_TEXT:].decode(errors="replace")
    return results + [Failed(reason, text)] * (num_calls - len(results))


def _result(line: bytes) -> CallResult:
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


def parse(text: bytes) -> Any:
    """Parse JSON. Raises `NotPlainData` for what is no JSON, is no UTF-8, is nested too deeply, or has a number that is
    not finite or has thousands of digits."""
    try:
        return json.loads(text.decode(), parse_constant=_refused, parse_float=_finite)
    except RecursionError:
        raise NotPlainData("nested too deeply") from None
    except ValueError as error:
        raise NotPlainData(f"no plain data: {str(error)[:200]}") from None


def same(expected: Any, got: Any, tolerance: float = 1e-9) -> bool:
    """Return whether two values are equal. Numbers are equal within the relative `tolerance` if one is a float; true
    and false are no numbers."""
    if isinstance(expected, bool) or isinstance(got, bool) or expected is None or got is None:
        return expected is got
    if isinstance(expected, int | float) and isinstance(got, int | float):
        return _same_number(expected, got, tolerance)
    if isinstance(expected, str) and isinstance(got, str):
        return expected == got
    if isinstance(expected, list) and isinstance(got, list):
        return len(expected) == len(got) and all(same(a, b, tolerance) for a, b in zip(expected, got, strict=True))
    if isinstance(expected, dict) and isinstance(got, dict):
        return expected.keys() == got.keys() and all(same(expected[key], got[key], tolerance) for key in expected)
    return False


def _same_number(expected: float, got: float, tolerance: float) -> bool:
    if isinstance(expected, int) and isinstance(got, int):
        return expected == got
    try:
        return math.isclose(expected, got, rel_tol=tolerance)
    except OverflowError:  # an int that no float holds
        return expected == got


def _refused(word: str) -> Any:
    raise ValueError(f"{word} is no JSON")


def _finite(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise ValueError(f"{digits[:40]} is too large")
    return number

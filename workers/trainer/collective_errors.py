"""Failures of collectives by name. They come in two ways:

    gloo   a RuntimeError in the rank that waits                             ranks.phase ─▶ the same error
    NCCL   torch's watchdog prints what it saw and ends the rank (SIGABRT) ─▶ its last lines ─▶ watchdog_error

The watchdog writes what each rank called (torch's flight recorder) into a file before it ends the process, on all ranks
that it can reach. `recorder_environment` says where. Light to import.
"""

import re
from collections.abc import Mapping, Sequence

from penstock.conf.errors import (
    DeadlineExceeded,
    PartnerGone,
    PenstockError,
    WorkerDied,
    WorkerFailed,
    is_device_failure,
)

LOST = (
    "connection closed", "connection reset", "connection refused", "broken pipe", "socket closed", "remote process",
    "communicator was aborted",
)  # fmt: skip
"""Parts of messages of gloo and NCCL about a rank that is gone."""
TIMED_OUT = re.compile(
    r"Watchdog caught collective operation timeout: WorkNCCL\((?P<call>.*?Timeout\(ms\)=(?P<timeout_ms>\d+))\)"
)
STUCK = re.compile(r"watchdog got stuck for (?P<seconds>\d+) seconds")
ENDED = re.compile(r"watchdog thread terminated with exception: (?P<reason>.*)")
"""Texts of torch's ProcessGroupNCCL, 2.4 to 2.13."""
RECORD_PREFIX = "nccl_rank_"
"""Beginning of the names of the recorder's files; the rank's number follows."""


def late_error(place: str, other: str, timeout_s: float, last: str) -> DeadlineExceeded:
    """The error of a rank that has waited for another. `place`: where it waited; `last`: what torch said."""
    return DeadlineExceeded(
        f"{place}: {other} did not answer within {timeout_s:g} s ({last}). Raise trainer.collective_timeout_s if it "
        "was only slow; else see what it did last."
    )


def gone_error(place: str, last: str) -> PartnerGone:
    """The error of a rank whose partner is gone."""
    return PartnerGone(f"{place}: another rank is gone ({last}). What ended it is in its own error.")


def watchdog_error(ranks: Sequence[str], printed: Mapping[str, Sequence[str]]) -> PenstockError | None:
    """The reason why NCCL's watchdog has ended ranks; None where it has ended none. `printed`: last lines of each rank
    that is known, by name."""
    late = {name: found for name, lines in printed.items() if (found := _last(TIMED_OUT, lines))}
    if late:
        silent = [name for name in ranks if name not in late]
        (first, found), who = next(iter(late.items())), " or ".join(silent) or "another rank"
        return late_error(", ".join(late), who, int(found["timeout_ms"]) / 1000, f"NCCL in {first}: {found['call']}")
    for name, lines in printed.items():
        if found := _last(STUCK, lines):
            return late_error(name, "a call of CUDA or NCCL", float(found["seconds"]), "torch's watchdog was stuck")
        if found := _last(ENDED, lines):
            return _ended_error(name, found["reason"].strip()[:200])
    return None


def _ended_error(name: str, reason: str) -> PenstockError:
    """The error of a rank that the watchdog has ended for another reason than a deadline."""
    if any(word in reason.lower() for word in LOST):
        return gone_error(name, reason)
    is_users = "cuda error" in reason.lower() and not is_device_failure(RuntimeError(reason))
    kind = WorkerFailed if is_users else WorkerDied
    return kind(f"{name} was ended by NCCL's watchdog in torch: {reason}")


def _last(pattern: re.Pattern[str], lines: Sequence[str]) -> re.Match[str] | None:
    return next((found for line in reversed(lines) if (found := pattern.search(line))), None)


def recorder_environment(folder: str) -> dict[str, str]:
    """Environment variables that have torch write its flight recorder below `folder`, under the names of all its
    releases."""
    names = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
    sizes = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
    return {
        **dict.fromkeys(names, f"{folder}/{RECORD_PREFIX}"),
        **dict.fromkeys(sizes, "2000"),
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
    }

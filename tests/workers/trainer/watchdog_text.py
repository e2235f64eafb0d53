"""The text that torch's NCCL watchdog prints before it ends a process, in the form of torch's releases, for ranks that
have no NCCL."""

import os
import sys

TIME = "1218 20:27:21.426415540"
STACK = [
    "Exception raised from checkTimeout at /pytorch/torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:686 (most recent "
    "call first):",
    *(f"frame #{number}: <unknown function> + 0x{number:x} (0x7f in libtorch_cuda.so)" for number in range(6)),
]


def timed_out(rank: int, timeout_s: float, release: str = "2.13") -> list[str]:
    """Lines of a rank that has waited for a collective in vain."""
    ms = int(timeout_s * 1000)
    work = f"WorkNCCL(SeqNum=5, OpType=ALLREDUCE, NumelIn=1024, NumelOut=1024, Timeout(ms)={ms})"
    caught = f"[Rank {rank}] Watchdog caught collective operation timeout: {work} ran for {ms + 60} milliseconds "
    caught += "before timing out."
    return [f"[rank{rank}]:[E{TIME} ProcessGroupNCCL.cpp:629] {caught}", *ended_by(rank, caught, release)]


def ended_by(rank: int, reason: str, release: str = "2.13") -> list[str]:
    """Lines of a rank whose watchdog ends the process."""
    group = f"PG ID 0 PG GUID 0(default_pg) Rank {rank}" if release == "2.13" else f"PG 0 (default_pg) Rank {rank}"
    thread = f"[{group}] Process group watchdog thread terminated with exception: {reason}"
    return [
        f"[rank{rank}]:[E{TIME} ProcessGroupNCCL.cpp:2168] [{group}]  failure detected by watchdog at work sequence "
        "id: 5 PG status: last enqueued work: 5, last completed work: 4",
        f"[rank{rank}]:[E{TIME} ProcessGroupNCCL.cpp:758] [Rank {rank}] To avoid data inconsistency, we are taking the "
        "entire process down.",
        f"[rank{rank}]:[E{TIME} ProcessGroupNCCL.cpp:2057] {thread}",
        *STACK,
        "terminate called after throwing an instance of 'c10::DistBackendError'",
        f"  what():  {thread}",
        *STACK,
        "",
    ]


def end_as_the_watchdog_does(rank: int, timeout_s: float) -> None:
    """Print, write the flight recorder's file, and end this process by SIGABRT."""
    with open(f"{os.environ['TORCH_FR_DUMP_TEMP_FILE']}{rank}", "wb") as record:
        record.write(b"what rank %d called" % rank)
    os.write(2, "\n".join(timed_out(rank, timeout_s)).encode())
    sys.stderr.flush()
    os.abort()

"""The CPUs of this machine: what Linux says of them, and the settings of a process that computes with torch on them,
made before torch is imported, which reads them once. Imports nothing heavy.

Waiting threads: threads that wait at a barrier spin by default. Engines, ranks and everything else of a run share the
cores, so the thread that all wait for may have no core while the others spin on theirs: beside one busy process two
threads that spin take 1.5 times as long as two that sleep, which alone are as fast.

Large tensors: what an update frees goes back to the system, and is taken anew by the next, page by page. With pages of
2 MiB, where the kernel has them, 60,000 faults an update become a tenth, and a seventh of its time goes.
"""

import os
from pathlib import Path

SETTINGS = {"OMP_WAIT_POLICY": "PASSIVE", "THP_MEM_ALLOC_ENABLE": "1"}


def cpu_entry(key: str) -> str:
    """The first core's entry in /proc/cpuinfo, such as `model name`, `vendor_id` or `flags`; empty where there is
    none."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    entries = (line.split(":", 1) for line in lines if ":" in line)
    return next((value.strip() for name, value in entries if name.strip() == key), "")


def prepare_for_torch() -> None:
    """Set the environment variables of `SETTINGS`; those that the user has set stay."""
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)

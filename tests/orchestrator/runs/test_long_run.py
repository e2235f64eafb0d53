"""A run of 2,000 steps: the memory of no actor grows."""

import os
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path

import psutil
import pytest

from tests.run_files import metrics_of

NUM_STEPS, DEADLINE_S = 2000, 3600.0
PAUSE_S = 2.0
GROWTH = 0.03
"""Largest growth of an actor's memory over the second half of the run, as a share."""
WINDOWS = 5
"""Number of windows of the second half: the median of the last is compared with that of the first."""


def memory_of(root: psutil.Process) -> dict[str, int]:
    """Bytes that each actor's process has to itself, by its name and id."""
    found = {}
    for process in [root, *root.children(recursive=True)]:
        try:
            words = process.cmdline()
            if process == root or (words and words[0].startswith(("ray::", "VLLM::")) and "IDLE" not in words[0]):
                name = "driver" if process == root else words[0].partition(".")[0]  # an actor's has its present call
                found[f"{name} {process.pid}"] = process.memory_full_info().uss
        except (psutil.NoSuchProcess, psutil.ZombieProcess):
            continue
    return found


@pytest.mark.soak
def test_the_memory_of_no_actor_grows(small_run: list[str], tmp_path: Path) -> None:
    words = [*small_run, f"trainer.max_steps={NUM_STEPS}", "max_staleness=1", "trainer.groups_per_step=2"]
    words += ["checkpoint.every_steps=100", "evaluation.every_steps=0", f"output_dir={tmp_path}", "name=long"]
    command = [sys.executable, "-m", "penstock.cli.main", "run", *words]
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    seen: dict[str, list[int]] = defaultdict(list)
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)
        try:
            deadline = time.monotonic() + DEADLINE_S
            while process.poll() is None:
                assert time.monotonic() < deadline, (tmp_path / "log").read_text()[-2000:]
                for name, size in memory_of(psutil.Process(process.pid)).items():
                    seen[name].append(size)
                time.sleep(PAUSE_S)
        finally:
            process.kill()
            process.wait()
    assert process.returncode == 0, (tmp_path / "log").read_text()[-2000:]
    assert metrics_of(tmp_path / "long")[-1]["step"] == NUM_STEPS
    longest = max(map(len, seen.values()))
    throughout = {name: sizes for name, sizes in seen.items() if len(sizes) > 0.8 * longest}
    kinds = {name.split()[0] for name in throughout}
    assert {"driver", "ray::Store", "ray::Trainer", "ray::Rollout", "ray::Prompts", "ray::Reward"} <= kinds
    growth = {}
    for name, sizes in throughout.items():
        half = sizes[len(sizes) // 2 : -1]
        width = max(1, len(half) // WINDOWS)
        first, last = statistics.median(half[:width]), statistics.median(half[-width:])
        growth[name] = round(last / first - 1.0, 4)
        print(f"{name}: {first / 2**20:.1f} MiB, {growth[name]:+.2%}")
    assert {name: share for name, share in growth.items() if share > GROWTH} == {}

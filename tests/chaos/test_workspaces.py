"""Asynchronous runs whose policy writes commands in workspaces, while the actors that have these die and hang at random
moments, and fences are killed below them: they keep their promises, and nothing is left. `make chaos` draws many."""

import json
import os
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from penstock.workers.sandbox.original_tree import base_directory, key_of
from tests.chaos.bed import OneMachine
from tests.chaos.checker import Promises, answers_of, broken
from tests.chaos.disturbance import Disturbed
from tests.chaos.outcome import note
from tests.chaos.plan import COMMAND, FENCE, KILL, SEEDS, STOP, Target, draw
from tests.chaos.test_one_machine import NOTICED_S, SETTINGS, START_S
from tests.processes import seen, wait_until_gone
from tests.run_files import metrics_of

pytestmark = pytest.mark.real

STEPS, MAX_STALENESS = 24, 2
ENVIRONMENT = Path(__file__).with_name("commands.py")
TARGETS = [
    *(Target(f"Environment-{index}", how) for how in (KILL, STOP, FENCE, FENCE) for index in range(2)),
    *(Target(who, KILL) for who in ("Rollout-0", "Trainer-policy-0", "Store", "Agent", COMMAND)),
]  # fmt: skip


def test_nothing_is_left_of_workspaces_whose_actors_and_fences_are_killed(
    small_run: Sequence[str], driver_environment: dict[str, str], warm_python: list[str], tmp_path: Path
) -> None:
    for seed in SEEDS:
        directory, tree = tmp_path / f"workspaces-{os.getpid()}-{seed}", tmp_path / f"tree-{seed}"
        tree.mkdir()
        (tree / "answer").touch()
        key, sleep = key_of(tree), f"{900_000 + seed}.{os.getpid()}"
        words = [
            *small_run, *SETTINGS, f"environment.name={ENVIRONMENT}:Commands", "data.source=environment",
            "data.path=null", f"environment.options.tree={tree}", f"environment.options.sleep='{sleep}'",
            "environment.num_workers=2", f"trainer.max_steps={STEPS}", f"max_staleness={MAX_STALENESS}",
        ]  # fmt: skip
        run = Disturbed(OneMachine(driver_environment), warm_python, words, directory, retries=20)
        done = run.go(draw(seed, TARGETS, STEPS))
        note(answers_of(directory, done))
        promises = Promises(STEPS, 4, 4, MAX_STALENESS, NOTICED_S, START_S)
        assert not broken(directory, promises, done), json.dumps([vars(one) for one in done])
        assert metrics_of(directory)[-1]["environment/turns"] > 0
        wait_until_gone(seen(processes_with(key) + processes_with(sleep)))
        base = base_directory()
        assert not (base.exists() and [name for name in os.listdir(base) if name.startswith(key)])
        assert not [place for place in Path("/proc/mounts").read_text().splitlines() if key in place]
        assert not list(Path("/dev/shm").glob(f"penstock-{directory.name}-*"))


def processes_with(word: str) -> list[int]:
    return [
        one.pid for one in psutil.process_iter(["cmdline"]) if any(word in text for text in one.info["cmdline"] or [])
    ]

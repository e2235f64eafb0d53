"""What is found is told once, and again when it comes back; a step that hangs is told with who is waited for."""

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from penstock.conf.diagnosis import DiagnosisConfig
from penstock.conf.errors import StoreError
from penstock.orchestrator.configuration.compose import load_config
from penstock.orchestrator.observability.diagnosis import LOOK_S, Diagnosis, Pace, Stalls, chain_of
from penstock.orchestrator.observability.reporting.progress import ProgressDisplay
from penstock.orchestrator.run_directory.run_directory import RunDirectory
from tests.virtual_time import run_virtually


def test_a_finding_is_told_once_and_again_when_it_comes_back(tmp_path: Path) -> None:
    config = load_config([f"output_dir={tmp_path}", "recipe=arithmetic", "name=demo"])
    directory, progress = RunDirectory.create(config), ProgressDisplay(config, "demo", console=Console(quiet=True))
    diagnosis = Diagnosis(DiagnosisConfig(window=5), 0, directory, progress)
    for step in range(1, 61):
        is_cut = step <= 20 or step > 40
        diagnosis.look(step, {"step": step, "response_length/clip_ratio": 1.0 if is_cut else 0.0})
    progress.close()
    directory.close()
    events = [event for event in directory.read_events() if event["kind"] == "warning"]
    assert [(event["rule"], event["step"]) for event in events] == [("cut_off", 5), ("cut_off", 43)]
    assert "max_tokens" in events[0]["advice"]
    assert len([text for text in progress.warnings if text.startswith("warning: ")]) == 2


def test_it_can_be_switched_off(tmp_path: Path) -> None:
    config = load_config([f"output_dir={tmp_path}", "recipe=arithmetic", "name=demo"])
    directory, progress = RunDirectory.create(config), ProgressDisplay(config, "demo", console=Console(quiet=True))
    diagnosis = Diagnosis(DiagnosisConfig(enabled=False, window=2), 0, directory, progress)
    for step in range(5):
        assert not diagnosis.look(step, {"step": step, "response_length/clip_ratio": 1.0})
    directory.close()
    progress.close()


CONFIG = DiagnosisConfig(window=5, stall_factor=10, stall_least_s=30)
WRITERS = {"response_ids": "rollout", "response_text": "rollout", "reward": "reward", "advantage": "group_advantage"}
RANKS = ["Trainer-policy-0"]


def described(**more: Any) -> dict[str, Any]:
    lacking = {"advantage": 4, "reward": 2}
    return {"oldest_group": 7, "oldest_group_waits_for": lacking, "leases": [], "waiters": {}, "rows": {}, **more}


def test_a_step_is_too_long_by_those_before_it() -> None:
    pace = Pace(CONFIG)
    for _ in range(4):
        pace.add(5.0)
    assert pace.limit_s is None
    pace.add(5.0)
    assert pace.limit_s == 50.0
    pace.add(40.0)  # one with an evaluation
    assert pace.limit_s == 80.0
    fast = Pace(CONFIG)
    for _ in range(5):
        fast.add(0.1)
    assert fast.limit_s == 30.0


def test_the_first_thing_that_is_lacking_names_whose_turn_it_is() -> None:
    leases = [
        {"stage": "reward", "owner": "Reward-1", "open_rows": 2},
        {"stage": "rollout", "owner": "Rollout-0", "open_rows": 9},
    ]
    chain = chain_of(described(leases=leases), WRITERS, RANKS)
    assert chain.members == ("Reward-1",)
    assert (
        "group, 7, lacks reward of 2 row(s), which reward writes: 2 row(s) of that stage are under way with Reward-1"
        in chain.text
    )


@pytest.mark.parametrize(
    ("more", "members", "words"),
    [
        ({"oldest_group": None, "oldest_group_waits_for": {}}, tuple(RANKS), "the turn of Trainer-policy-0"),
        ({"oldest_group_waits_for": {}}, tuple(RANKS), "the turn of Trainer-policy-0"),
        (
            {"rows": {"reward": {"free": 2}}, "waiters": {"reward": ["Reward-0"]}},
            ("Reward-0",),
            "nobody has taken its 2",
        ),
        ({}, (), "nobody has it under way"),
    ],
)
def test_a_stall_in_which_nobody_works_is_told_as_well(
    more: dict[str, Any], members: tuple[str, ...], words: str
) -> None:
    chain = chain_of(described(**more), WRITERS, RANKS)
    assert chain.members == members
    assert words in chain.text


class Run:
    """A run of which a step hangs."""

    def __init__(self, tmp_path: Path, describe: Any = None) -> None:
        config = load_config([f"output_dir={tmp_path}", "recipe=arithmetic", "name=demo"])
        self.directory, self.progress = (
            RunDirectory.create(config),
            ProgressDisplay(config, "demo", console=Console(quiet=True)),
        )
        self.asked: list[Sequence[str]] = []
        self._describe = describe

    async def stacks(self, names: Sequence[str]) -> Sequence[str]:
        self.asked.append(names)
        return [f"stacks/{name}.txt" for name in names]

    async def describe(self) -> Mapping[str, Any]:
        if self._describe is not None:
            raise self._describe
        return described(leases=[{"stage": "reward", "owner": "Reward-1", "open_rows": 2}])

    async def go(self, seconds: Sequence[float]) -> None:
        clock = asyncio.get_running_loop().time
        stalls = Stalls(
            CONFIG, self.describe, self.stacks, WRITERS, lambda: RANKS, self.directory, self.progress, clock
        )
        running = asyncio.ensure_future(stalls.run())
        for step, took in enumerate(seconds, 1):
            await asyncio.sleep(took)
            stalls.finished(step, took)
        running.cancel()

    @property
    def told(self) -> list[dict[str, Any]]:
        self.progress.close()
        self.directory.close()
        return [event for event in self.directory.read_events() if event["kind"] == "warning"]


def test_a_stall_is_told_once_with_the_stacks_of_those_who_are_waited_for(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run_virtually(run.go([5.0] * 6 + [400.0] + [5.0] * 3))
    (event,) = run.told
    assert (event["rule"], event["step"], event["members"]) == ("stall", 7, ["Reward-1"])
    assert event["stacks"] == ["stacks/Reward-1.txt"]
    assert 50 < float(event["text"].split("taken ")[1].split(" s")[0]) <= 50 + 2 * LOOK_S
    assert run.asked == [("Reward-1",)]


def test_steps_that_are_merely_longer_are_none(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run_virtually(run.go([5.0] * 5 + [20.0, 45.0, 80.0] + [5.0] * 3))
    assert run.told == []


def test_a_store_that_does_not_answer_is_told_as_that(tmp_path: Path) -> None:
    run = Run(tmp_path, describe=StoreError("it is away"))
    run_virtually(run.go([5.0] * 6 + [100.0]))
    assert "does not say who waits for whom: it is away" in run.told[0]["text"]

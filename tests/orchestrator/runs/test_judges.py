"""A whole run whose reward is given by a frozen model of its own: its engine dies as others do, and is replaced."""

from pathlib import Path

import pytest

from penstock.orchestrator.configuration.compose import load_config
from penstock.orchestrator.run import run
from tests.orchestrator.runs.killing import Killing
from tests.run_files import events_of, metrics_of

pytestmark = pytest.mark.real


def test_a_frozen_model_judges_and_another_takes_its_place(small_run: list[str], tmp_path: Path, cluster: str) -> None:
    (prompts,) = (word.removeprefix("data.path=") for word in small_run if word.startswith("data.path="))
    words = [
        *small_run, f"evaluation.path={prompts}", "reward.function=judge", "+reward.options.max_tokens=16",
        "reward.timeout_s=60",
        "reward.judge.kv_cache_gib=0.1", "reward.judge.max_model_len=1024", "rollout.engine=hf", "faults.pause_s=0.1",
        "trainer.max_steps=4", "evaluation.every_steps=4", "evaluation.num_problems=8", "name=judged",
        f"output_dir={tmp_path}",
    ]  # fmt: skip
    result = run(load_config(words), quiet=True, sinks=[Killing(tmp_path / "judged", "Reward-0", 2)])
    lines = metrics_of(result.directory)
    assert [line["step"] for line in lines] == [0, 1, 2, 3, 4]
    assert all("accuracy/heldout" in lines[step] for step in (0, 4))
    lines = lines[1:]
    assert all(0 <= line["reward/min"] <= line["reward/max"] <= 1 for line in lines)
    assert not any(line.get("dropped/reward_error") for line in lines)
    assert [event["member"] for event in events_of(result.directory) if event["kind"] == "recovered"] == ["Reward-0"]

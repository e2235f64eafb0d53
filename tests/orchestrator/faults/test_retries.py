"""`penstock run --retries N`: the command is taken up again when it is killed, and not where that is of no use."""

import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from safetensors.torch import load_file

from penstock.orchestrator import retries
from penstock.orchestrator.retries import run_with_retries
from tests.run_files import metrics_of

STEPS = 4


@pytest.mark.ray
@pytest.mark.slow
def test_a_command_that_is_killed_goes_on_by_itself_and_ends_with_the_same_bits(
    small_run: list[str], cluster: str, warm_python: list[str], driver_environment: dict[str, str], tmp_path: Path
) -> None:
    words = [
        *small_run, "rollout.num_threads=1", "trainer.num_threads=1", "rollout.engine=hf", "checkpoint.every_steps=1",
        f"trainer.max_steps={STEPS}", f"output_dir={tmp_path}",
    ]  # fmt: skip
    command = [*warm_python, "-m", "penstock.orchestrator.cli", "run", "--retries", "1", *words]
    whole = subprocess.run(
        [*command, "name=whole"], env=driver_environment, capture_output=True, text=True, timeout=240
    )
    assert whole.returncode == 0, whole.stderr[-3000:]
    process = subprocess.Popen([*command, "name=killed"], env=driver_environment, stderr=subprocess.PIPE, text=True)
    metrics, deadline = tmp_path / "killed" / "metrics.jsonl", time.monotonic() + 120
    while not metrics.exists() or metrics.read_bytes().count(b"\n") < 2:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    tries = [
        child
        for child in psutil.process_iter(["cmdline"])
        if {"name=killed", "run"} <= set(child.info["cmdline"] or []) and "--retries" not in child.info["cmdline"]
    ]
    for child in tries:
        child.send_signal(signal.SIGKILL)
    _, said = process.communicate(timeout=240)
    assert process.returncode == 0, said[-3000:]
    assert "killed has ended (killed by SIGKILL); going on from its newest checkpoint in 1 s" in said
    assert [line["step"] for line in metrics_of(tmp_path / "killed")] == list(range(1, STEPS + 1))
    one, other = (load_file(tmp_path / name / "model" / "model.safetensors") for name in ("whole", "killed"))
    assert all(one[name].equal(other[name]) for name in one)


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., list[list[str]]]:
    """What each try was told, where they end with these codes."""

    def go(codes: list[int], may_help: bool) -> list[list[str]]:
        words: list[list[str]] = []

        def ended(told: list[str]) -> int:
            words.append(list(told))
            return codes[len(words) - 1]

        monkeypatch.setattr(retries, "_run", ended)
        monkeypatch.setattr(retries, "_may_help", lambda config, code: may_help)
        monkeypatch.setattr(retries.time, "sleep", lambda _: None)
        code = run_with_retries(["recipe=arithmetic", f"output_dir={tmp_path}", "resume=never"], 2)
        assert code == codes[len(words) - 1]
        return words

    return go


def test_tries_are_of_one_run_and_later_ones_go_on(tried: Callable[..., list[list[str]]]) -> None:
    first, second, third = tried([-9, 1, 0], True)
    assert first[2] == "resume=never"
    assert second[-1] == third[-1] == "resume=auto"
    names = {word for words in (first, second, third) for word in words if word.startswith("name=")}
    assert len(names) == 1


def test_there_are_no_more_than_were_asked_for(tried: Callable[..., list[list[str]]]) -> None:
    assert len(tried([1, 1, 1, 1], True)) == 3


def test_what_would_come_again_is_told_once(tried: Callable[..., list[list[str]]]) -> None:
    assert len(tried([2, 0], False)) == 1

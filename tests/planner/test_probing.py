"""Plans that are tried: what a probe is told, what counts of it, and that its failure has a name and ends nothing else.
A real one is in `tests/orchestrator/runs/test_probes.py`."""

import io
import json
import shlex
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from rich.console import Console

from penstock.cli.main import main
from penstock.conf.errors import ConfigError
from penstock.orchestrator.cluster.placement.nodes import Node
from penstock.orchestrator.configuration.compose import load_config
from penstock.planner import plan_view
from penstock.planner.calibration import (
    STEPS,
    Probe,
    ProbeOverdue,
    ProbesFailed,
    fastest_probe,
    first_steps,
    parse_probes,
    probe,
    run_in_process,
)
from penstock.planner.plan_inputs import search_of
from penstock.planner.search import Plan

WORDS = ("recipe=gsm8k", "model.path=Qwen/Qwen2.5-1.5B-Instruct", "rollout.max_model_len=1536",
         "rollout.sampling.max_tokens=1024", "trainer.groups_per_step=8", "max_staleness=1")  # fmt: skip
Fate = Callable[[Path, Path, float], int]
"""What becomes of a run: its directory, its log and its deadline."""


@pytest.fixture(scope="module")
def plans() -> list[Plan]:
    return search_of(load_config(list(WORDS)), "1x4:h100", "400").best()[:3]


def keys_of(words: Sequence[str]) -> dict[str, str]:
    return dict(word.split("=", 1) for word in words)


class Runs:
    """Runs that only pretend, each with its fate."""

    def __init__(self, *fates: Fate) -> None:
        self.fates, self.words = list(fates), list[dict[str, str]]()

    def __call__(self, words: Sequence[str], log: Path, deadline_s: float) -> int:
        self.words.append(keys_of(words))
        place = Path(self.words[-1]["output_dir"], self.words[-1]["name"])
        place.mkdir(parents=True)
        (place / "config.yaml").write_text("name: it\n")
        return self.fates[len(self.words) - 1](place, log, deadline_s)


def takes(seconds: float, slow_first: int = 2, num_steps: int = 20) -> Fate:
    """Each step so long, after some first ones that take a hundred times as long."""

    def run(place: Path, log: Path, deadline_s: float) -> int:
        lines = [
            {"step": step, "timing_s/step": seconds * (100 if step <= slow_first else 1)}
            for step in range(1, num_steps + 1)
        ]
        (place / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        return 0

    return run


def fails(place: Path, log: Path, deadline_s: float) -> int:
    said = "Rollout-0 died\n  in line 3"
    event = {"time": "2026-01-01T00:00:00Z", "kind": "failed", "error": "WorkerDied", "message": said}
    (place / "events.jsonl").write_text(json.dumps(event) + "\n")
    return 1


def is_refused(place: Path, log: Path, deadline_s: float) -> int:
    log.write_text("starting\nresources: 8 GPUs are asked for, and 4 are there\n\n")
    return 2


def is_overdue(place: Path, log: Path, deadline_s: float) -> int:
    raise ProbeOverdue(f"not done after {deadline_s / 60:.1f} minutes")


def fails_and_hangs(place: Path, log: Path, deadline_s: float) -> int:
    fails(place, log, deadline_s)
    return is_overdue(place, log, deadline_s)


def is_killed(place: Path, log: Path, deadline_s: float) -> int:
    return -int(signal.SIGKILL)


def tried(plans: Sequence[Plan], place: Path, runs: Runs, deadline_s: float | None = None) -> tuple[list[Probe], str]:
    said = io.StringIO()
    chosen = [(plan, [*WORDS, f"seed={number}"]) for number, plan in enumerate(plans)]
    return probe(chosen, place, deadline_s, runs, Console(file=said, width=200)), said.getvalue()


def test_the_fastest_is_kept_whatever_was_predicted(plans: list[Plan], tmp_path: Path) -> None:
    found, said = tried(plans, tmp_path, Runs(takes(3.0), takes(2.0), takes(4.0)))
    assert [one.step_s for one in found] == pytest.approx([3.0, 2.0, 4.0])
    best = fastest_probe(found)
    assert best.plan is plans[1]
    assert best.overrides == (*WORDS, "seed=1")
    assert "probe 2 of 3" in said


def test_probes_are_short_runs_that_leave_little(plans: list[Plan], tmp_path: Path) -> None:
    runs = Runs(*[takes(1.0)] * 3)
    tried(plans, tmp_path, runs)
    assert len({told["name"] for told in runs.words}) == 3
    for told, plan in zip(runs.words, plans, strict=True):
        assert told["trainer.max_steps"] == str(first_steps(plan.config) + STEPS)
        assert told["output_dir"] == str(tmp_path)
        assert told["checkpoint.every_steps"] == told["evaluation.every_steps"] == told["faults.lease_s"] == "0"
        load_config([f"{key}={value}" for key, value in told.items()])


def test_steps_that_fill_the_pipeline_do_not_count(plans: list[Plan], tmp_path: Path) -> None:
    assert first_steps(load_config([*WORDS, "max_staleness=4"])) == 5
    assert first_steps(load_config([*WORDS, "max_staleness=0"])) == 2
    (found,), _ = tried(plans[:1], tmp_path, Runs(takes(1.0, slow_first=first_steps(plans[0].config))))
    assert found.step_s == 1.0


@pytest.mark.parametrize(("fate", "name"), [
    (fails, "WorkerDied: Rollout-0 died"), (is_refused, "exit code 2: resources: 8 GPUs are asked for"),
    (fails_and_hangs, "WorkerDied: Rollout-0 died"), (is_overdue, "ProbeOverdue: not done after"),
    (is_killed, "killed by SIGKILL"), (takes(1.0, num_steps=3), "exit code 0, fewer than 5 steps"),
])  # fmt: skip
def test_a_failure_has_a_name_and_ends_no_other_probe(plans: list[Plan], tmp_path: Path, fate: Fate, name: str) -> None:
    found, _ = tried(plans, tmp_path, Runs(fate, takes(2.0), takes(1.0)))
    assert found[0].failure.startswith(name)
    assert found[0].step_s == 0
    assert [one.failure for one in found[1:]] == ["", ""]
    assert fastest_probe(found) is found[2]


def test_where_all_fail_each_says_why(plans: list[Plan], tmp_path: Path) -> None:
    with pytest.raises(ProbesFailed, match=r"(?s)1: WorkerDied.*2: killed by SIGKILL"):
        tried(plans[:2], tmp_path, Runs(fails, is_killed))


def test_every_probe_has_a_deadline(plans: list[Plan], tmp_path: Path) -> None:
    limits = []

    def noted(place: Path, log: Path, deadline_s: float) -> int:
        limits.append(deadline_s)
        return takes(1.0)(place, log, deadline_s)

    tried(plans[:1], tmp_path / "own", Runs(noted), 1200.0)
    tried(plans[:1], tmp_path / "usual", Runs(noted))
    steps = first_steps(plans[0].config) + STEPS
    assert limits == [1200.0, pytest.approx(900 + 10 * steps * plans[0].step_s)]


@pytest.mark.real
def test_a_run_that_is_not_done_in_time_is_ended(tmp_path: Path) -> None:
    forever = [sys.executable, "-c", "import time\nwhile True: time.sleep(60)"]
    with pytest.raises(ProbeOverdue, match="--probe N:MINUTES"):
        run_in_process([], tmp_path / "log", 0.2, forever)
    prints = [sys.executable, "-c", "import sys; print(sys.argv[1]); sys.exit(3)"]
    assert run_in_process(["word"], tmp_path / "other", 900, prints) == 3
    assert (tmp_path / "other").read_text() == "word\n"


def test_what_is_asked_is_read_and_refused_by_name() -> None:
    assert parse_probes("3") == (3, None)
    assert parse_probes("2:20") == (2, 1200)
    for text in ("0", "many", "3:0", "3:soon", "-1"):
        with pytest.raises(ConfigError, match="--probe 3:20"):
            parse_probes(text)


def test_the_command_writes_the_keys_of_the_fastest(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    nodes = [Node("n", "n", "10.0.0.1", 64, 4, {"ray.io/accelerator-type": "H100"})]
    runs = Runs(fails, takes(7.0))
    monkeypatch.setattr(plan_view, "nodes_here", lambda config: nodes)
    monkeypatch.setattr(plan_view, "run_in_process", runs)
    monkeypatch.chdir(tmp_path)
    assert main(["plan", WORDS[0], "--probe", "2", *WORDS[1:], "--lengths", "400", "--write", "keys"]) == 0
    said, keys = capsys.readouterr().out, (tmp_path / "keys").read_text().split()
    assert "Of those that were tried the best is" in said
    assert "WorkerDied: Rollout-0 died" in said
    assert said.rstrip().endswith(shlex.join(["penstock", "run", *keys]))
    told = runs.words[1]
    assert keys_of(keys) == {key: told[key] for key in keys_of(keys)}
    assert Path(told["output_dir"]).parent == tmp_path / "probes"


def test_probes_need_the_gpus_that_they_are_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *WORDS, "--probe", "2", "--cluster", "1x4:h100"]) == 2
    assert "Leave one of them out" in capsys.readouterr().err
    monkeypatch.setattr(plan_view, "nodes_here", lambda config: [Node("d", "d", "10.0.0.9", 8)])
    assert main(["plan", *WORDS, "--probe", "2"]) == 2
    assert "none is known" in capsys.readouterr().err

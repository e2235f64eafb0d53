"""Sweeps of a command that only pretends to train."""

import json
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from penstock.cli import main as cli
from penstock.conf.errors import ConfigError
from penstock.orchestrator.configuration.sweep import Sweep, jobs_for, points_of, room_for

PRETENDER = """
import json, os, pathlib, signal, sys, time
words = dict(word.split("=", 1) for word in sys.argv[1:])
path = pathlib.Path(words["output_dir"], words["name"])
path.mkdir(exist_ok=True)
(path / "config.yaml").write_text(f"name: {words['name']}\\n")
calls = pathlib.Path(words["output_dir"]).parent / "calls"
calls.mkdir(exist_ok=True)
(calls / f"{words['name']}-{os.getpid()}").write_text(words["tracking.group"])

def event(kind):
    with (path / "events.jsonl").open("a") as file:
        file.write(json.dumps({"time": "2026-01-01T00:00:00Z", "kind": kind}) + "\\n")

def interrupted(*_):
    event("interrupted")
    sys.exit(130)

for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, interrupted)
event("start")
if words.get("mood") == "slow" and not (path.parent.parent / "hurry").exists():
    time.sleep(60)
time.sleep(float(words.get("takes", "0")))
if words.get("mood") == "bad":
    event("failed")
    sys.exit(3)
(path / "metrics.jsonl").write_text(json.dumps({"step": 1, "accuracy/heldout": int(words["seed"]) / 10}) + "\\n")
event("end")
"""


@pytest.fixture
def pretender(tmp_path: Path) -> list[str]:
    file = tmp_path / "pretender.py"
    file.write_text(PRETENDER)
    return [sys.executable, str(file)]


def swept(tmp_path: Path, command: list[str], *words: str, jobs: int = 2) -> tuple[int, str]:
    console = Console(record=True, width=160)
    code = Sweep(points_of(words), tmp_path / "sweep", jobs, console, command).run()
    return code, console.export_text()


def calls(tmp_path: Path) -> list[str]:
    return sorted(file.name.rpartition("-")[0] for file in (tmp_path / "calls").iterdir())


@pytest.mark.real
def test_settings_are_told_with_the_spread_of_their_seeds(tmp_path: Path, pretender: list[str]) -> None:
    code, said = swept(tmp_path, pretender, "lr=1,2", "seed=1,2,3")
    assert code == 0
    rows = [line.split() for line in said.splitlines() if "of 3" in line]
    assert [row[:4] for row in rows] == [["1", "3", "of", "3"], ["2", "3", "of", "3"]]
    assert said.count("20.0% (10.0% to 30.0%)") == 2
    assert len(json.loads((tmp_path / "sweep" / "sweep.json").read_text())["runs"]) == 6


@pytest.mark.real
def test_a_run_that_fails_costs_itself_alone_and_is_made_again(tmp_path: Path, pretender: list[str]) -> None:
    code, said = swept(tmp_path, pretender, "mood=good,bad", "seed=1,2")
    assert code == 1
    assert said.count("has ended (exit code 3)") == 2
    assert said.count("is finished") == 2
    code, said = swept(tmp_path, pretender, "mood=good,bad", "seed=1,2")
    assert "2 are finished already" in said
    assert calls(tmp_path).count("mood-good_seed-1") == 1
    assert calls(tmp_path).count("mood-bad_seed-1") == 2


@pytest.mark.real
def test_no_more_run_side_by_side_than_there_is_room_for(
    tmp_path: Path, pretender: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    most = []
    start = Sweep._start

    def counted(self: Sweep, point: Any) -> None:
        start(self, point)
        most.append(len(self._running))

    monkeypatch.setattr(Sweep, "_start", counted)
    swept(tmp_path, pretender, "takes=0.3", "seed=1,2,3,4,5", jobs=2)
    assert (len(most), max(most)) == (5, 2)


@pytest.mark.real
@pytest.mark.parametrize("signals", [[signal.SIGINT], [signal.SIGTERM, signal.SIGTERM]], ids=["Ctrl-C", "timeout"])
def test_a_signal_ends_the_runs_in_order_and_the_sweep_goes_on_later(
    tmp_path: Path, pretender: list[str], signals: list[signal.Signals]
) -> None:
    def interrupt() -> None:
        deadline = time.monotonic() + 300
        while len(list(tmp_path.glob("sweep/*/events.jsonl"))) < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
        for number in signals:
            signal.raise_signal(number)

    thread = threading.Thread(target=interrupt)
    thread.start()
    code, _ = swept(tmp_path, pretender, "mood=slow", "seed=1,2,3")
    thread.join()
    assert code == 130
    kinds = [json.loads(line)["kind"] for file in tmp_path.glob("sweep/*/events.jsonl") for line in file.open()]
    assert sorted(kinds) == ["interrupted", "interrupted", "start", "start"]
    (tmp_path / "hurry").write_text("")
    code, said = swept(tmp_path, pretender, "mood=slow", "seed=1,2,3")
    assert (code, said.count("is finished")) == (0, 3)


@pytest.mark.real
def test_its_runs_are_one_group_for_trackers_unless_it_is_said_otherwise(tmp_path: Path, pretender: list[str]) -> None:
    for place, words, group in (("a", (), "sweep"), ("b", ("tracking.group=mine",), "mine")):
        swept(tmp_path / place, pretender, "seed=1,2", *words)
        assert {file.read_text() for file in (tmp_path / place / "calls").iterdir()} == {group}


@pytest.mark.real
def test_the_directory_of_another_sweep_is_not_mixed_with_it(tmp_path: Path, pretender: list[str]) -> None:
    swept(tmp_path, pretender, "seed=1,2")
    with pytest.raises(ConfigError, match="another sweep is there"):
        swept(tmp_path, pretender, "seed=1,2,3")


def test_words_that_are_wrong_are_told_before_the_first_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["recipe=arithmetic", "seed=1,2", "trainer.optimizer.lrr=3", "--directory", str(tmp_path / "sweep")]
    assert cli.main(["sweep", *words]) == 2
    assert "lrr" in capsys.readouterr().err
    assert not (tmp_path / "sweep").exists()


def test_there_is_room_for_at_least_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert jobs_for(points_of(["recipe=arithmetic", "seed=1,2"])) >= 1
    assert room_for(3, 0, 7, 0) == 2

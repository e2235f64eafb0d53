"""The table of runs, from directories in every state."""

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.orchestrator.observability.differences import differing
from penstock.orchestrator.observability.runs.found import RunLine, Runs, newest
from penstock.orchestrator.observability.runs.own_files import last_lines
from penstock.ui.answers import OpenRun
from tests.ui.made_runs import HERE, make_run, steps


def lines_of(place: Path) -> dict[str, RunLine]:
    return {line.id: line for line in Runs(place).lines()}


def test_a_run_is_a_line(tmp_path: Path) -> None:
    make_run(tmp_path / "sums", "start", "serving", "end", metrics=steps(2))
    line = lines_of(tmp_path)["sums"]
    assert (line.name, line.state, line.recipe, line.algorithm) == ("sums", "finished", "sums", "grpo")
    assert (line.step, line.max_steps, line.accuracy, line.reward, line.seconds) == (2, 9, 0.25, 0.2, 2.0)


def test_the_line_of_a_run_has_the_id_that_metrics_and_messages_carry(tmp_path: Path) -> None:
    run = make_run(tmp_path / "sums", "start", holder=HERE)
    runs = Runs(tmp_path)
    assert runs.lines()[0].run_id is None
    (run / "run_id").write_text("0123abcd\n")
    assert runs.lines()[0].run_id == "0123abcd"
    (run / "run_id").write_bytes(b"\xff" * 100)  # no run's
    assert runs.lines()[0].state == "running"


def test_a_run_without_rewards_has_its_loss_in_the_line(tmp_path: Path) -> None:
    make_run(tmp_path / "sft", "start", "end", metrics=[{"step": 1, "actor/loss": 2.5}])
    make_run(tmp_path / "grpo", "start", "end", metrics=[{"step": 1, "actor/loss": 2.5, "reward/mean": 0.5}])
    lines = lines_of(tmp_path)
    assert (lines["sft"].loss, lines["sft"].reward) == (2.5, None)
    assert (lines["grpo"].loss, lines["grpo"].reward) == (None, 0.5)


def test_in_a_finished_run_nobody_waits(tmp_path: Path) -> None:
    state = {"step": 2, "members": [], "waits": [{"who": "Rollout-0", "on": "Prompts", "what": "a prompt"}]}
    for kinds, waits in ((("start", "end"), []), (("start", "failed"), state["waits"])):
        make_run(tmp_path / kinds[-1], *kinds)
        (tmp_path / kinds[-1] / "state.json").write_text(json.dumps(state))
        assert OpenRun(tmp_path / kinds[-1], kinds[-1]).state()["state"]["waits"] == waits


@pytest.mark.parametrize(
    ("kinds", "holder", "state"),
    [
        (("start",), HERE, "running"),
        (("start",), {**HERE, "pid": 2**22 + 1}, "lost"),
        (("start",), {"pid": 1, "host": "elsewhere"}, "running"),
        (("start",), {}, "lost"),
        (("start",), None, "unfinished"),
        (("start", "failed"), None, "failed"),
        (("start", "failed", "resume"), HERE, "running"),
        (("start", "failed", "resume", "end"), None, "finished"),
        (("start", "interrupted"), None, "interrupted"),
        ((), HERE, "running"),
    ],
)
def test_its_state_is_that_of_its_last_start_or_end(
    tmp_path: Path, kinds: tuple[str, ...], holder: Any, state: str
) -> None:
    make_run(tmp_path / "run", *kinds, holder=holder)
    line = lines_of(tmp_path)["run"]
    assert line.state == state
    assert line.error == ("no room" if state == "failed" else None)


def test_runs_are_found_below_a_place_and_the_place_itself_may_be_one(tmp_path: Path) -> None:
    make_run(tmp_path / "a" / "one", "start")
    make_run(tmp_path / "a" / "one" / "warm_start", "start")
    make_run(tmp_path / ".hidden", "start")
    (tmp_path / "empty").mkdir()
    assert set(lines_of(tmp_path)) == {"a/one", "a/one/warm_start"}
    assert set(lines_of(tmp_path / "a" / "one")) == {".", "warm_start"}
    assert not lines_of(tmp_path / "nowhere")


def test_the_cost_of_a_run_is_its_reservation_times_its_duration(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", "start", "serving", "end")
    assert lines_of(tmp_path)["run"].cost is None  # it does not say
    with (run / "events.jsonl").open("a") as events:
        placed = {"time": "2026-01-01T02:00:00.000Z", "kind": "placed", "cpus": 3.0, "gpus": 0.0}
        events.write(json.dumps(placed) + "\n")
    line = lines_of(tmp_path)["run"]
    assert (line.cost, line.cost_unit) == (6.0, "CPU h")


def test_a_changed_run_is_read_again_and_a_removed_one_is_gone(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", "start", "end", metrics=steps(1))
    runs = Runs(tmp_path)
    assert runs.lines()[0].step == 1
    with (run / "metrics.jsonl").open("a") as opened:
        opened.write('{"step": 7}\n{"step": 8')
    assert runs.lines()[0].step == 7
    (run / "config.yaml").unlink()
    assert not runs.lines()


def test_files_of_another_version_or_half_written_are_no_error(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", "start")
    (run / "config.yaml").write_text("name: [unclosed")
    (run / "events.jsonl").write_text('{"kind": "future_thing"}\nnot json\n{"kind": "en')
    (run / "metrics.jsonl").write_text("")
    line = lines_of(tmp_path)["run"]
    assert (line.name, line.state, line.step) == ("run", "unfinished", None)


def test_no_path_leads_out_of_the_place(tmp_path: Path) -> None:
    make_run(tmp_path / "outside", "start")
    inside = make_run(tmp_path / "place" / "in", "start")
    (tmp_path / "place" / "link").symlink_to(tmp_path / "outside")
    runs = Runs(tmp_path / "place")
    assert runs.path_of("in") == inside
    assert [runs.path_of(path) for path in ("../outside", str(tmp_path / "outside"), "link", "in/nothing", "")] == [
        None
    ] * 5


def test_the_end_of_a_long_file_is_enough(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text(
        "".join(
            json.dumps({"step": step, "rare": step} if step % 9 == 0 else {"step": step}) + "\n" for step in range(5000)
        )
    )
    lines = last_lines(tmp_path, file.name, 1000)
    assert lines[-1] == {"step": 4999}
    assert newest(lines, "rare") == 4995
    assert newest(lines, "nothing") is None
    assert len(lines) < 100


def test_differences_are_what_several_runs_do_not_share() -> None:
    one = {"name": "a", "trainer": {"lr": 1, "steps": 5}, "seed": 1}
    other = {"name": "b", "trainer": {"lr": 2, "steps": 5}, "seed": 1, "extra": None}
    assert differing({"a": one, "b": other}) == {"trainer.lr": {"a": 1, "b": 2}}


def test_below_a_run_only_its_own_warm_start_is_looked_for(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", "start")
    make_run(run / "samples" / "deep", "start")
    make_run(run / "warm_start", "start")
    assert set(lines_of(tmp_path)) == {"run", "run/warm_start"}

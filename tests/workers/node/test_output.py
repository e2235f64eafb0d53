"""What the processes of a node have printed."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from penstock.conf.errors import DeadlineExceeded
from penstock.workers.node.node_actor import MOST_BYTES, NodeOutput
from penstock.workers.runtime.processes import ProcessId
from penstock.workers.trainer.collective_errors import watchdog_error

TALKER = "import sys\nfor line in sys.stdin:\n  exec(line)\n  sys.stdout.flush(); print('done', file=sys.__stderr__)"


@contextmanager
def talker(folder: Path) -> Iterator["subprocess.Popen[str]"]:
    """A process that prints into a file what it is told to, as Ray's workers do."""
    with (folder / "worker.out").open("a") as out:
        process = subprocess.Popen(
            [sys.executable, "-c", TALKER], stdin=subprocess.PIPE, stdout=out, stderr=subprocess.PIPE, text=True
        )
        try:
            yield process
        finally:
            process.kill()
            process.wait()


def do(process: "subprocess.Popen[str]", code: str) -> None:
    assert process.stdin is not None
    assert process.stderr is not None
    process.stdin.write(code + "\n")
    process.stdin.flush()
    assert process.stderr.readline() == "done\n"


@pytest.mark.real
def test_lines_are_told_once_and_only_when_they_are_whole(tmp_path: Path) -> None:
    output = NodeOutput()
    with talker(tmp_path) as process:
        there = {"Rollout-0": ProcessId.of(process.pid)}
        do(process, "print('one'); print('tw', end='')")
        assert output.take(there) == {"Rollout-0": [("out", "one")]}
        do(process, "print('o'); print(':actor_name:Rollout')")
        assert output.take(there) == {"Rollout-0": [("out", "two")]}
        assert output.take(there) == {}


@pytest.mark.real
def test_the_last_words_of_a_process_that_died_are_told(tmp_path: Path) -> None:
    output = NodeOutput()
    with talker(tmp_path) as process:
        there = {"Rollout-0": ProcessId.of(process.pid)}
        output.take(there)
        do(process, "print('no room', end='')")
    assert output.take(there) == {"Rollout-0": [("out", "no room")]}
    assert output.take({}) == {}


@pytest.mark.real
def test_another_in_its_place_goes_on_under_its_name(tmp_path: Path) -> None:
    output = NodeOutput()
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    with talker(tmp_path / "a") as first, talker(tmp_path / "b") as second:
        output.take({"Rollout-0": ProcessId.of(first.pid)})
        do(first, "print('the first')")
        do(second, "print('the second')")
        told = output.take({"Rollout-0": ProcessId.of(second.pid)})
    assert told == {"Rollout-0": [("out", "the first"), ("out", "the second")]}


@pytest.mark.real
def test_who_is_not_known_of_for_a_while_repeats_nothing(tmp_path: Path) -> None:
    output = NodeOutput()
    with talker(tmp_path) as process:
        there = {"Rollout-0": ProcessId.of(process.pid)}
        do(process, "print('one')")
        output.take(there)
        do(process, "print('two')")
        assert output.take({}) == {"Rollout-0": [("out", "two")]}
        assert output.take(there) == {}


@pytest.mark.real
def test_a_flood_loses_its_middle_and_says_so(tmp_path: Path) -> None:
    output = NodeOutput()
    with talker(tmp_path) as process:
        there = {"Rollout-0": ProcessId.of(process.pid)}
        do(process, f"print(('x' * 99 + '\\n') * {MOST_BYTES // 50}, end=''); print('the end')")
        [(_, first), *_, last] = output.take(there)["Rollout-0"]
    assert "bytes left out" in first
    assert last == ("out", "the end")


@pytest.mark.real
def test_the_end_of_an_aborted_rank_is_read_once_and_its_log_keeps_it(tmp_path: Path) -> None:
    output = NodeOutput()
    record = f"import os; os.environ['TORCH_FR_DUMP_TEMP_FILE'] = '{tmp_path}/record_'; os.dup2(1, 2)"
    call = "from tests.workers.trainer.watchdog_text import end_as_the_watchdog_does; end_as_the_watchdog_does(0, 30)"
    with talker(tmp_path) as process:
        there = {"Trainer-policy-0": ProcessId.of(process.pid)}
        output.take(there)
        assert process.stdin is not None
        process.stdin.write(f"{record}\n{call}\n")
        process.stdin.close()
        assert process.wait(60) == -signal.SIGABRT
        ends = output.take_end(["Trainer-policy-0", "Trainer-policy-1"])
        assert type(watchdog_error(["Trainer-policy-0", "Trainer-policy-1"], ends)) is DeadlineExceeded
        assert output.take_end(["Trainer-policy-0"]) == {}, "not the end of the next one"
    assert any("Watchdog caught" in line for _, line in output.take({})["Trainer-policy-0"])


def test_a_process_of_another_machine_is_left_alone() -> None:
    stranger = ProcessId(os.getpid(), ("another", str(time.time())))
    assert NodeOutput().take({"Rollout-0": stranger}) == {}

"""The stacks of a process can be had whatever it does: while C code holds Python's lock, and without py-spy."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from penstock.workers.runtime import processes
from penstock.workers.runtime.processes import ProcessId

NOWHERE = "/nowhere/py-spy"
WORKER = """
import itertools, sys, threading, time
from penstock.workers.runtime.processes import register

def waiting_in_a_thread():
    time.sleep(600)

def endless_c_call():
    print("there", flush=True)
    sum(itertools.repeat(0))  # holds Python's lock

if sys.argv[1]:
    register(sys.argv[1])
threading.Thread(target=waiting_in_a_thread, daemon=True).start()
endless_c_call()
"""


def started(*arguments: str) -> subprocess.Popen[str]:
    process = subprocess.Popen([sys.executable, "-c", WORKER, *arguments], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "there\n"
    return process


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    with started(str(tmp_path)) as process:
        yield process
        process.kill()


def stop(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGSTOP)
    while psutil.Process(process.pid).status() != psutil.STATUS_STOPPED:
        time.sleep(0.01)


@pytest.mark.real
def test_py_spy_reads_the_stacks_of_a_stopped_process(worker: subprocess.Popen[str], tmp_path: Path) -> None:
    stop(worker)
    text = processes.dump(ProcessId.of(worker.pid), tmp_path, "Rollout-1")
    assert text.startswith(f"Rollout-1, process {worker.pid} (stopped):\n")
    assert "endless_c_call" in text


@pytest.mark.real
@pytest.mark.parametrize("py_spy", [None, NOWHERE], ids=["py-spy", "signal"])
def test_an_endless_c_call_and_the_other_threads_are_in_the_stacks(
    worker: subprocess.Popen[str], tmp_path: Path, py_spy: str | None
) -> None:
    text = processes.dump(ProcessId.of(worker.pid), tmp_path, "Rollout-1", py_spy)
    assert text.startswith(f"Rollout-1, process {worker.pid} (running):\n")
    assert "endless_c_call" in text
    assert "waiting_in_a_thread" in text
    assert worker.poll() is None


@pytest.mark.real
def test_a_second_dump_has_the_new_stacks_alone(worker: subprocess.Popen[str], tmp_path: Path) -> None:
    first, second = (processes.dump(ProcessId.of(worker.pid), tmp_path, "Rollout-1", NOWHERE) for _ in range(2))
    assert second.count("endless_c_call") == first.count("endless_c_call") == 1


@pytest.mark.real
def test_an_unregistered_process_is_not_sent_the_signal_which_would_end_it(tmp_path: Path) -> None:
    with started("") as process:
        (tmp_path / f"{process.pid}.txt").write_text("")  # of one before it, with the same number
        text = processes.dump(ProcessId.of(process.pid), tmp_path, "Rollout-1", NOWHERE)
        assert "it has not registered" in text
        assert process.poll() is None
        process.kill()


@pytest.mark.real
def test_a_stopped_process_that_py_spy_cannot_look_at_is_told_as_such(
    worker: subprocess.Popen[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "WRITE_S", 0.5)
    stop(worker)
    text = processes.dump(ProcessId.of(worker.pid), tmp_path, "Rollout-1", NOWHERE)
    assert "(stopped)" in text
    assert "it wrote no stacks within 0.5 s" in text


def test_of_a_process_that_is_gone_or_another_there_are_none(tmp_path: Path) -> None:
    other = ProcessId(os.getpid(), ("1", "2", "3", "4"))
    assert "it is gone, or of another machine" in processes.dump(other, tmp_path, "Rollout-1")


@pytest.mark.real
def test_a_dump_is_cut_to_its_size(tmp_path: Path) -> None:
    spy = tmp_path / "py-spy"
    spy.write_text("#!/bin/sh\nhead -c 1000000 /dev/zero | tr '\\0' x\n")
    spy.chmod(0o755)
    text = processes.dump(ProcessId.own(), tmp_path, "me", str(spy))
    assert len(text) == processes.MAX_BYTES


def test_where_the_directory_is_not_nothing_is_made(tmp_path: Path) -> None:
    assert processes.register(tmp_path / "not" / "there") == ProcessId.own()
    assert not (tmp_path / "not").exists()

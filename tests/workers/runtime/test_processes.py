"""A process is ended with all that it has started, and nobody else is for it."""

import dataclasses
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from torch._inductor.runtime.cache_dir_utils import cache_dir

from penstock.workers.runtime.processes import ProcessId, keep_compiled, kill

PARENT = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(child.pid, flush=True)
time.sleep(600)
"""


@pytest.fixture
def parent() -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A process and the one that it has started."""
    process = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    child = int(process.stdout.readline())
    yield process, child
    for pid in (process.pid, child):
        if psutil.pid_exists(pid):
            os.kill(pid, signal.SIGKILL)
    process.stdout.close()
    process.wait()


def test_a_process_knows_itself() -> None:
    own = ProcessId.own()
    assert own.pid == os.getpid()
    assert own == ProcessId.of(os.getpid())
    assert own.is_alive


@pytest.mark.real
@pytest.mark.parametrize("stopped", [False, True])
def test_it_and_its_children_are_ended_even_if_it_is_stopped(
    parent: tuple[subprocess.Popen[str], int], stopped: bool
) -> None:
    process, child = parent
    first, second = ProcessId.of(process.pid), ProcessId.of(child)
    if stopped:
        process.send_signal(signal.SIGSTOP)
    assert kill(first)
    assert not first.is_alive
    assert not second.is_alive
    assert process.wait() == -signal.SIGKILL


@pytest.mark.real
def test_another_process_with_its_number_is_left_alone(parent: tuple[subprocess.Popen[str], int]) -> None:
    process, child = parent
    now = ProcessId.of(process.pid)
    pid, start, namespace, boot = now.proof
    for proof in [(pid, str(int(start) - 1), namespace, boot), (pid, start, "1", boot), (pid, start, namespace, "b")]:
        assert kill(dataclasses.replace(now, proof=proof))
    assert process.poll() is None
    assert psutil.pid_exists(child)


@pytest.mark.real
def test_one_that_is_gone_needs_no_end() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    gone = ProcessId.of(process.pid)
    process.wait()
    assert not gone.is_alive
    assert kill(gone)


@pytest.mark.real
def test_what_users_code_left_is_ended_with_its_children_and_nothing_older() -> None:
    code = "import subprocess, time; subprocess.Popen(['sleep', '60']); print('ready', flush=True); time.sleep(60)"
    program = f"""
import subprocess, sys
from penstock.workers.runtime.processes import children, end_children

def start():
    child = subprocess.Popen([sys.executable, "-c", {code!r}], stdout=subprocess.PIPE)
    child.stdout.readline()
    return child

first, others = start(), children()
second = start()
print(end_children(but=others), second.wait(10), first.poll(), end_children(), first.wait(10), flush=True)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=900)
    assert done.stdout.split() == ["2", "-9", "None", "2", "-9"], done.stderr


def test_what_is_compiled_stays_where_the_next_run_finds_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    keep_compiled()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "penstock" / "inductor")
    assert cache_dir() == str(tmp_path / "penstock" / "inductor"), "torch takes it"
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/of/the/user")
    keep_compiled()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "/of/the/user"


def test_without_a_home_torch_keeps_its_own_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    keep_compiled()
    assert "TORCHINDUCTOR_CACHE_DIR" not in os.environ

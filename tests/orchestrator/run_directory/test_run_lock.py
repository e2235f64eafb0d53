"""One process at a time works in a directory, and who is refused hears of the other."""

import errno
import fcntl
import getpass
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from penstock.conf.errors import RunInUse
from penstock.orchestrator.configuration.compose import load_config
from penstock.orchestrator.run_directory.run_directory import RunDirectory
from penstock.orchestrator.run_directory.run_lock import FILE, RunLock

HOLDER = """
import sys
from pathlib import Path
from penstock.orchestrator.configuration.compose import load_config
from penstock.orchestrator.run_directory.run_directory import RunDirectory
from penstock.orchestrator.run_directory.run_lock import RunLock
lock = RunLock.take(Path(sys.argv[1]), "name=sums")
print("held", flush=True)
sys.stdin.read()
"""


def test_the_second_process_is_told_who_was_first(tmp_path: Path) -> None:
    lock = RunLock.take(tmp_path / "sums", "name=sums")
    with pytest.raises(RunInUse) as raised:
        RunLock.take(tmp_path / "sums", "name=sums")
    message = str(raised.value)
    assert message.startswith(f"name=sums: {tmp_path}/sums is in use by process {os.getpid()} of {getpass.getuser()} ")
    assert f" on {socket.gethostname()}, started 20" in message
    lock.release()
    RunLock.take(tmp_path / "sums", "name=sums").release()


@pytest.mark.real
def test_a_process_that_is_killed_holds_no_lock(tmp_path: Path) -> None:
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], **pipes) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(RunInUse, match=f"process {holder.pid} of"):
            RunLock.take(tmp_path, "name=sums")
        holder.kill()
        holder.wait()
        RunLock.take(tmp_path, "name=sums").release()


def test_a_lock_whose_file_was_removed_meanwhile_is_taken_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The holder removes directory and file between this process's open and its lock."""
    first = RunLock.take(tmp_path / "a", "name=a")
    real, calls = fcntl.flock, []

    def flock(descriptor: int, operation: int) -> None:
        if not calls:
            first.release(remove=True)
            (tmp_path / "a").rmdir()
        calls.append(operation)
        real(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    lock = RunLock.take(tmp_path / "a", "name=a")
    assert len(calls) == 2
    with pytest.raises(RunInUse):
        RunLock.take(tmp_path / "a", "name=a")
    lock.release()


def test_a_file_system_without_locks_is_used_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    RunLock.take(tmp_path, "name=a").release()


def test_a_lock_that_keeps_nobody_out_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    directory = RunDirectory.create(load_config([f"output_dir={tmp_path}", "name=alone"]))
    told: list[str] = []
    directory.failed_writes.set_printer(told.append)
    directory.close()
    assert f"{tmp_path}/alone is on a file system without locks (flock)" in told[0]


def test_a_holder_that_has_not_written_its_name_yet_is_refused_all_the_same(tmp_path: Path) -> None:
    lock = RunLock.take(tmp_path, "name=a")
    (tmp_path / FILE).write_text("")
    with pytest.raises(RunInUse, match="another process"):
        RunLock.take(tmp_path, "name=a")
    lock.release()
    lock.release()

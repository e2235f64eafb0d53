"""Directories of dead processes are removed; those of living ones are not touched, and no other user enters them."""

import fcntl
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from penstock.store.data.roots import OWNER_NAME, claim_root, remove_root, sweep_stale

GUARDED = """
import sys
from penstock.store.data.roots import claim_root, guard_root
claim_root(sys.argv[1])
guard_root(sys.argv[1])
sys.stdin.read()
"""
CLAIM = "import sys; from penstock.store.data.roots import claim_root; claim_root(sys.argv[1])"


@pytest.mark.real
def test_the_root_of_a_dead_process_is_removed(tmp_path: Path) -> None:
    root = tmp_path / "penstock-dead"
    subprocess.run([sys.executable, "-c", CLAIM, str(root)], check=True)
    (root / "v00000001").mkdir()
    assert sweep_stale(tmp_path) == [str(root)]
    assert not root.exists()


def test_the_root_of_a_living_process_stays(tmp_path: Path) -> None:
    root = claim_root(tmp_path / "penstock-alive")
    assert sweep_stale(tmp_path) == []
    assert root.exists()


@pytest.mark.real
@pytest.mark.parametrize("is_claimed_again", [False, True])
def test_the_guard_of_a_killed_process_removes_what_was_its_own_and_no_more(
    tmp_path: Path, is_claimed_again: bool
) -> None:
    root = tmp_path / "penstock-guarded"
    with subprocess.Popen([sys.executable, "-c", GUARDED, str(root)], stdin=subprocess.PIPE) as process:
        wait_until(lambda: bool(guards_of(root)))
        if is_claimed_again:
            remove_root(root)
            claim_root(root)
        process.kill()
    wait_until(lambda: not guards_of(root))
    assert root.exists() == is_claimed_again
    assert len(list(tmp_path.iterdir())) == is_claimed_again


@pytest.mark.real
def test_a_guard_that_is_slow_moves_nothing_that_was_claimed_meanwhile(tmp_path: Path) -> None:
    root = tmp_path / "penstock-guarded"
    with subprocess.Popen([sys.executable, "-c", GUARDED, str(root)], stdin=subprocess.PIPE) as process:
        wait_until(lambda: bool(guards_of(root)))
        held = os.open(root, os.O_RDONLY)
        fcntl.flock(held, fcntl.LOCK_EX)  # as one who has begun to remove it
        process.kill()
    (guard,) = guards_of(root)
    wait_until(lambda: any(child.name() == "flock" for child in guard.children()))
    os.rename(root, tmp_path / "swept")
    claim_root(root)
    os.close(held)
    wait_until(lambda: not guards_of(root))
    assert root.exists()


def guards_of(root: Path) -> list[psutil.Process]:
    return [
        process
        for process in psutil.process_iter(["cmdline"])
        if "penstock-guard" in (words := process.info["cmdline"] or []) and str(root) in words
    ]


def wait_until(is_true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 300
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.real
def test_a_process_that_its_parent_has_not_waited_for_is_dead(tmp_path: Path) -> None:
    root = tmp_path / "penstock-zombie"
    with subprocess.Popen([sys.executable, "-c", CLAIM, str(root)]) as process:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert sweep_stale(tmp_path) == [str(root)]


def test_a_reused_pid_does_not_keep_a_root_alive(tmp_path: Path) -> None:
    root = claim_root(tmp_path / "penstock-reused")
    pid, _, *where = (root / OWNER_NAME).read_text().split()
    (root / OWNER_NAME).write_text(" ".join([pid, "1", *where]))
    assert sweep_stale(tmp_path) == [str(root)]


@pytest.mark.parametrize("place", [2, 3], ids=["namespace", "boot"])
def test_a_pid_of_another_namespace_or_machine_says_nothing(tmp_path: Path, place: int) -> None:
    root = claim_root(tmp_path / "penstock-elsewhere")
    owner = ["999999999", *(root / OWNER_NAME).read_text().split()[1:]]
    owner[place] = "1"
    (root / OWNER_NAME).write_text(" ".join(owner))
    assert sweep_stale(tmp_path) == []


def test_unclaimed_roots_and_other_names_stay(tmp_path: Path) -> None:
    (tmp_path / "penstock-unclaimed").mkdir()
    (tmp_path / "somebody-else").mkdir()
    assert sweep_stale(tmp_path) == []
    assert len(list(tmp_path.iterdir())) == 2


def test_only_its_user_may_enter_a_root_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        root = claim_root(tmp_path / "deep" / "penstock-private")
    finally:
        os.umask(before)
    assert root.stat().st_mode & 0o777 == 0o700


def test_a_name_that_is_taken_is_another_s_and_refused(tmp_path: Path) -> None:
    (tmp_path / "penstock-taken").mkdir()
    with pytest.raises(FileExistsError):
        claim_root(tmp_path / "penstock-taken")

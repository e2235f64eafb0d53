"""What a process is told before torch is there."""

import os

import pytest

from penstock.workers.openmp import let_waiting_threads_sleep


def test_waiting_threads_sleep_unless_the_user_has_them_spin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    let_waiting_threads_sleep()
    assert os.environ["OMP_WAIT_POLICY"] == "PASSIVE"
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    let_waiting_threads_sleep()
    assert os.environ["OMP_WAIT_POLICY"] == "ACTIVE"

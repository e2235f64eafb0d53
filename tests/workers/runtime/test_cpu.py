"""What a process is told before torch is there."""

import os

import pytest

from penstock.workers.runtime.processes import SETTINGS, prepare_for_torch


def test_threads_sleep_and_pages_are_large_unless_the_user_wants_it_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in SETTINGS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    prepare_for_torch()
    assert {name: os.environ[name] for name in SETTINGS} == SETTINGS | {"OMP_WAIT_POLICY": "ACTIVE"}
    for name in SETTINGS:
        monkeypatch.delenv(name)

"""A member that hangs before it has loaded anything is named at the deadline of a start, not after a wait besides."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from penstock.conf.errors import DeadlineExceeded, WorkerDied
from penstock.orchestrator.observability.actor_logs import Logs
from tests.fakes.actors import FakeHandle, never


def logs_of(tmp_path: Path, *handles: FakeHandle) -> Logs:
    watched = [("rollout", handle.name, handle) for handle in handles]
    fleet = SimpleNamespace(watched=watched, stacks_root="", agent_of=lambda name: None)
    return Logs(fleet, SimpleNamespace(path=tmp_path))  # type: ignore[arg-type]


def test_a_member_that_says_nothing_at_the_start_is_named_at_its_deadline(tmp_path: Path) -> None:
    logs = logs_of(tmp_path, FakeHandle(None, "Rollout-0"), FakeHandle(None, "Rollout-1", process=never))
    with pytest.raises(DeadlineExceeded, match=r"Rollout-1.* 0\.05 s"):
        logs.meet(0.05)


def test_a_member_that_has_died_is_told_of_by_who_starts_it(tmp_path: Path) -> None:
    logs_of(tmp_path, FakeHandle(None, "Rollout-0", process=WorkerDied("Rollout-0 has died"))).meet(0.05)

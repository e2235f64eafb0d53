"""What a run makes of the checkpoint that its actors were to start from, when they fail."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from penstock.conf.errors import DamagedCheckpoint, WorkerDied
from penstock.orchestrator.recovery.resume import damage_of
from penstock.store.service.snapshot import MANIFEST
from tests.orchestrator.one_machine import empty_snapshot


@pytest.mark.parametrize("starts_from_it", [True, False])
def test_a_store_that_was_to_read_a_broken_snapshot_died_of_that(starts_from_it: bool, tmp_path: Path) -> None:
    death, store = WorkerDied("Store has died"), empty_snapshot(str(tmp_path), 1)
    resumed = SimpleNamespace(store=str(tmp_path))
    assert damage_of(resumed, death, starts_from_it) is None  # type: ignore[arg-type]
    (Path(store) / MANIFEST).write_text("{")
    assert (damage_of(resumed, death, starts_from_it) is not None) == starts_from_it  # type: ignore[arg-type]


def test_actors_that_were_taken_over_may_outlive_their_checkpoint(tmp_path: Path) -> None:
    resumed = SimpleNamespace(store=str(tmp_path / "removed"))
    assert damage_of(resumed, WorkerDied("Trainer-0 has died"), has_read_it=False) is None  # type: ignore[arg-type]
    damaged = DamagedCheckpoint("its trainer's files are broken")
    assert damage_of(resumed, damaged, has_read_it=False) is damaged  # type: ignore[arg-type]

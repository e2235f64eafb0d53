"""Shared memory of dead runs is given back; that of living ones is not touched."""

import subprocess
import sys
from pathlib import Path

from penstock.workers.weights.roots import OWNER_NAME, claim_root, sweep_stale

CLAIM = "import sys; from penstock.workers.weights.roots import claim_root; claim_root(sys.argv[1])"


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


def test_a_reused_pid_does_not_keep_a_root_alive(tmp_path: Path) -> None:
    root = claim_root(tmp_path / "penstock-reused")
    pid, _, namespace = (root / OWNER_NAME).read_text().split()
    (root / OWNER_NAME).write_text(f"{pid} 1 {namespace}")
    assert sweep_stale(tmp_path) == [str(root)]


def test_other_namespaces_unclaimed_roots_and_other_names_stay(tmp_path: Path) -> None:
    (tmp_path / "penstock-unclaimed").mkdir()
    (tmp_path / "somebody-else").mkdir()
    elsewhere = claim_root(tmp_path / "penstock-elsewhere")
    (elsewhere / OWNER_NAME).write_text("999999999 1 1")
    assert sweep_stale(tmp_path) == []
    assert len(list(tmp_path.iterdir())) == 3

"""Runs on machines with a long temporary directory, without a home, and on clusters that want a token."""

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.conf.errors import ResourceError
from penstock.orchestrator.cluster.local_ray import LocalRay
from penstock.orchestrator.cluster.ray_cluster import look
from tests.run_files import metrics_of

pytestmark = pytest.mark.real
PATIENCE_S = 900


def test_a_run_needs_neither_a_home_nor_a_short_temporary_directory(small_run: list[str], tmp_path: Path) -> None:
    temporary = tmp_path / ("t" * 100)
    temporary.mkdir()
    words = [*small_run, "rollout.engine=hf", "trainer.max_steps=1", f"output_dir={tmp_path}", "name=unusual"]
    strange = ("RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_TMPDIR")
    environment = {name: value for name, value in os.environ.items() if name not in strange}
    environment |= {"HOME": f"{os.devnull}/home", "TMPDIR": str(temporary)}
    command = [sys.executable, "-m", "penstock.cli.main", "run", *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert len(metrics_of(tmp_path / "unusual")) == 1


def test_a_cluster_that_wants_a_token_says_which_variable_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "a" * 64)
    options = {"num_cpus": 1, "include_dashboard": False, "object_store_memory": 100 * 2**20}
    local = LocalRay({**options, "logging_level": logging.ERROR})
    try:
        monkeypatch.setenv("RAY_ADDRESS", local.address)
        nodes = look()
        assert nodes is not None
        assert [node.cpus for node in nodes] == [1]
        monkeypatch.delenv("RAY_AUTH_TOKEN")
        monkeypatch.setenv("HOME", os.devnull)
        with pytest.raises(ResourceError, match=r"set RAY_AUTH_TOKEN_PATH to the file .*, or RAY_AUTH_TOKEN"):
            look()
        monkeypatch.delenv("RAY_AUTH_MODE")
        with pytest.raises(ResourceError, match=r"set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN_PATH to the file"):
            look()
    finally:
        local.close()
    assert local.is_over

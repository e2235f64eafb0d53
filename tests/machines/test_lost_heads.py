"""A run whose cluster has lost its head for good ends as by any other failure, before Ray ends its process."""

import json
import subprocess
import time
from pathlib import Path

import pytest

from tests.machines.cluster import ROOT, machines
from tests.run_files import events_of, metrics_of

pytestmark = [pytest.mark.real, pytest.mark.machines]

AWAY_S = 40
"""Seconds that the head may be away, by Ray's setting."""


def test_a_run_without_a_head_ends_with_an_error_an_event_and_a_report(
    warm_python: list[str], small_run: list[str], tmp_path: Path
) -> None:
    warm, directory = Path(warm_python[0]).parent, tmp_path / "lost"
    words = [
        *small_run, "rollout.engine=hf", "reward.cpus_per_worker=0", "cluster.nodes=[machine2]", "name=lost",
        "trainer.max_steps=100000", "checkpoint.every_steps=5", f"output_dir={tmp_path}", "evaluation.every_steps=0",
    ]  # fmt: skip
    with machines(2, keep=[warm, tmp_path.parent]) as cluster:
        cluster.start_ray(
            num_cpus=[0, 2], warm=warm, environment={"RAY_gcs_rpc_server_reconnect_timeout_s": str(AWAY_S)}
        )
        run = cluster[2].start(
            [*warm_python, "-m", "penstock.cli.main", "run", *words], cwd=ROOT, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )  # fmt: skip
        deadline = time.monotonic() + 900
        while not (directory / "metrics.jsonl").is_file() or len(metrics_of(directory)) < 7:
            assert run.poll() is None, run.communicate()[0][-3000:]
            assert time.monotonic() < deadline
            time.sleep(0.2)
        cluster[1].cut()
        cluster[1].kill()
        output, _ = run.communicate(timeout=900)
    assert run.returncode == 1, output[-3000:]
    assert f"has not answered for {0.75 * AWAY_S:g} s" in " ".join(output.split())
    last = events_of(directory)[-1]
    assert (last["kind"], last["error"], last["may_recover"]) == ("failed", "RayEnded", True)
    assert "has not answered" in (directory / "report.html").read_text()
    lines = metrics_of(directory)
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    newest = max((directory / "checkpoints").glob("global_step_*"), key=lambda path: int(path.name.rpartition("_")[2]))
    assert len(lines) - int(newest.name.rpartition("_")[2]) < 10
    assert json.loads((directory / "timeline.json").read_text())

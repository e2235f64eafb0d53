"""The benchmark of checkpoints runs through; its figures are for quiet machines."""

import json
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_a_quick_run_writes_its_table_and_its_target(tmp_path, warm_python):
    file = tmp_path / "checkpoint.json"
    command = [*warm_python, "-m", "benchmarks.checkpoint", "--quick", "--rounds", "1", "--json", str(file)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "held up" in done.stdout
    result = json.loads(file.read_text())
    assert result["benchmark"] == "checkpoint"
    assert result["rounds"][0]["synchronous"]["bytes"] > 2.9e6 * 12
    assert [target["comparison"] for target in result["targets"]] == ["<=", "<="]

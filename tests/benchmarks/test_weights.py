"""`benchmarks.weights --quick` runs and writes what it promises; what it measures is not judged here."""

import json
import math
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.ray
@pytest.mark.vllm
@pytest.mark.slow
def test_a_quick_run_measures_both_sides(tmp_path: Path, warm_python: list[str]) -> None:
    pytest.importorskip("vllm", reason="vLLM is not installed: the benchmark needs its engine")
    file = tmp_path / "weights.json"
    command = [*warm_python, "-m", "benchmarks.weights", "--quick", "--json", str(file)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert result.returncode == 0, result.stdout + result.stderr
    content = json.loads(file.read_text())
    assert content["benchmark"] == "weights"
    assert {entry["side"] for entry in content["rounds"]} == {"Penstock", "naive"}
    assert len(content["targets"]) == 5
    assert all(math.isfinite(target["value"]) and target["value"] > 0 for target in content["targets"])

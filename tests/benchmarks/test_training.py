"""That the benchmark runs and writes its file; what it measures in a minute means little."""

import json
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_the_quick_run_measures_both_sides_of_both_comparisons(tmp_path: Path, warm_python: list[str]) -> None:
    file = tmp_path / "training.json"
    command = [*warm_python, "-m", "benchmarks.training", "--quick", "--json", str(file)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=600, stdout=subprocess.DEVNULL)
    written = json.loads(file.read_text())
    assert [entry["side"] for entry in written["rounds"]] == ["whole", "tiled", "fixed", "bucketed"]
    assert all(entry["seconds"] > 0 and entry["tokens"] > 0 for entry in written["rounds"])
    assert len(written["targets"]) == 4

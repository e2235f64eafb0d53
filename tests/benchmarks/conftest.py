import json
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def run_quickly(warm_python, tmp_path):
    """`benchmarks.NAME --quick`: the file that it wrote, and what it printed."""

    def run(name, *words):
        file = tmp_path / f"{name}.json"
        command = [*warm_python, "-m", f"benchmarks.{name}", "--quick", "--json", str(file), *words]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900, check=False)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
        return json.loads(file.read_text()), done.stdout

    return run

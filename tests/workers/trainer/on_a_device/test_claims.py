"""A trainer, a critic and a scorer on a device that is not the CPU, with real values: the same mathematics, and nothing
that stays behind on the device. All in one process of its own, since torch has an accelerator there."""

import json
import re
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.real

HERE = Path(__file__).parent
ROOT = HERE.parents[3]


@pytest.fixture(scope="module")
def failures(
    model_path: str, tmp_path_factory: pytest.TempPathFactory, warm_python: list[str]
) -> dict[str, str | None]:
    """What went wrong, by claim."""
    directory = tmp_path_factory.mktemp("device")
    results = directory / "results.json"
    module = "tests.workers.trainer.on_a_device.claims"
    done = subprocess.run(
        [*warm_python, "-m", module, model_path, directory, results],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
        timeout=900,
    )
    assert results.exists(), done.stderr
    found: dict[str, str | None] = json.loads(results.read_text())
    return found


@pytest.mark.parametrize(
    "claim",
    re.findall(r"^def ((?:it|every|a|kept|publications|tensors)_\w+)\(", (HERE / "claims.py").read_text(), re.M),
)
def test_on_a_device(failures: dict[str, str | None], claim: str) -> None:
    told = {name: failure for name, failure in failures.items() if name.startswith(claim)}
    assert told
    assert not any(told.values()), "\n".join(f"{name}: {failure}" for name, failure in told.items() if failure)

"""torchvision, which the CPU environment has in a build for CUDA, imports in every process that starts there, and costs
nothing before. Each claim is seen in a Python of its own."""

import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
HOOK = "torchvision_on_cpu.py"

pytestmark = pytest.mark.skipif(
    torch.version.cuda is not None, reason="torch is a build for CUDA here: torchvision's own kernels load beside it"
)


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_what_is_installed_is_what_the_lock_stands_beside() -> None:
    site = Path(sysconfig.get_path("purelib"))
    assert (site / HOOK).read_text() == (ROOT / "requirements" / HOOK).read_text()
    assert (site / HOOK).with_suffix(".pth").read_text().split() == ["import", "torchvision_on_cpu"]


@pytest.mark.real
def test_image_processors_and_vllms_models_that_see_can_be_imported() -> None:
    told = run(
        "from transformers import Qwen2VLImageProcessor, Qwen2VLVideoProcessor\n"
        "import vllm.model_executor.models.qwen2_5_vl, torchvision, torch\n"
        "picture = torch.zeros(3, 4, 4, dtype=torch.uint8)\n"
        "resized = torchvision.transforms.v2.functional.resize(picture, [2, 2])\n"
        "print(Qwen2VLImageProcessor.__name__, tuple(resized.shape))"
    )
    assert told.split("\n")[-2] == "Qwen2VLImageProcessor (3, 2, 2)"


@pytest.mark.real
def test_a_process_that_needs_no_torchvision_imports_neither_it_nor_torch() -> None:
    told = run(
        "import importlib.util, sys\n"
        "found = importlib.util.find_spec('torchvision') is not None\n"
        "print(found, 'torchvision_on_cpu' in sys.modules, *sorted({'torch', 'torchvision'} & {*sys.modules}))"
    )
    assert told.split() == ["True", "True"]


@pytest.mark.real
def test_the_projects_own_modules_import_torchvision_nowhere_by_themselves() -> None:
    told = run(
        "import sys\n"
        "import penstock.orchestrator.run, penstock.workers.prompts.opening, penstock.workers.rollout.rollout_worker\n"
        "import penstock.workers.rollout.engine_vllm, penstock.workers.rollout.engine_hf\n"
        "print('torchvision' in sys.modules)"
    )
    assert told.strip() == "False"

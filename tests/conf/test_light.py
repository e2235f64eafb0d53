import subprocess
import sys

import pytest

pytestmark = pytest.mark.real


def test_configuration_imports_neither_torch_nor_ray():
    code = (
        "import sys, penstock.conf.run, penstock.conf.model\n"
        "print([name for name in ('torch', 'ray', 'vllm', 'transformers', 'pyarrow') if name in sys.modules])"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed.strip() == "[]"

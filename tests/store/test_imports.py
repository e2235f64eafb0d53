"""The store's process is light, and the ledger is pure."""

import pickle
import subprocess
import sys

import pytest

from penstock.store import errors


def loaded_by(module: str) -> set[str]:
    code = f"import sys, {module}; print(*sorted({{name.split('.')[0] for name in sys.modules}}))"
    return set(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split())


@pytest.mark.real
def test_the_store_loads_neither_torch_nor_ray() -> None:
    assert not loaded_by("penstock.store.client.store_client") & {"torch", "ray", "transformers", "vllm"}


@pytest.mark.real
def test_the_ledger_loads_no_arrow_and_no_event_loop() -> None:
    assert not loaded_by("penstock.store.ledger.ledger") & {"torch", "ray", "pyarrow", "numpy", "asyncio"}


@pytest.mark.parametrize("name", [name for name, kind in vars(errors).items() if isinstance(kind, type)])
def test_errors_cross_processes(name: str) -> None:
    error = getattr(errors, name)("column 'reward', row 3: mend it")
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), str(copy)) == (type(error), str(error))

"""The state of an adapter as a file: safetensors, whose metadata has its spec and number of steps.

A file is seen whole or not at all, after a power cut too.
"""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from penstock.conf.errors import DataError
from penstock.orchestrator.serve.journal import sync_directory
from penstock.workers.local_files import replacing
from penstock.workers.training_calls import AdapterSpec, AdapterState


def write_state(file: Path, state: AdapterState) -> int:
    """Write a state; returns its size in bytes. Raises `OSError`."""
    file.parent.mkdir(parents=True, exist_ok=True)
    metadata = {"spec": json.dumps(asdict(state.spec)), "num_steps": str(state.num_steps)}
    tensors = {name: np.ascontiguousarray(value, np.float32) for name, value in state.tensors.items()}
    with replacing(file, synced=True) as part:
        save_file(tensors, part, metadata)
    sync_directory(file.parent)
    return file.stat().st_size


def read_state(file: Path, *, with_optimizer: bool = True) -> AdapterState:
    """Read a state; without optimizer its weights alone. Raises `DataError`."""
    try:
        with safe_open(file, framework="numpy") as source:
            spec, num_steps = _metadata(source)
            names = [name for name in source.keys() if with_optimizer or name.startswith("weights/")]  # noqa: SIM118
            tensors = {name: source.get_tensor(name) for name in names}
    except (OSError, SafetensorError, KeyError, ValueError, TypeError) as error:
        raise DataError(f"{file.name} cannot be read: {error}.") from error
    return AdapterState(spec, tensors, num_steps if with_optimizer else 0)


def read_spec(file: Path) -> AdapterSpec:
    """The spec alone. Raises `DataError`."""
    try:
        with safe_open(file, framework="numpy") as source:
            return _metadata(source)[0]
    except (OSError, SafetensorError, KeyError, ValueError, TypeError) as error:
        raise DataError(f"{file.name} cannot be read: {error}.") from error


def _metadata(source: Any) -> tuple[AdapterSpec, int]:
    metadata = source.metadata()
    return AdapterSpec(**json.loads(metadata["spec"])), int(metadata["num_steps"])

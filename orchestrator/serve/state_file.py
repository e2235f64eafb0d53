"""The state of an adapter as a file: safetensors, whose metadata has its spec and number of steps.

A file is seen whole or not at all, after a power cut too.
"""

import contextlib
import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from penstock.conf.errors import DataError
from penstock.orchestrator.serve.journal import JournalError, refusals
from penstock.workers.local_files import replacing
from penstock.workers.training_calls import AdapterSpec, AdapterState


def write_state(file: Path, state: AdapterState) -> int:
    """Write a state; returns its size in bytes. Raises `JournalError`."""
    metadata = {"spec": json.dumps(asdict(state.spec)), "num_steps": str(state.num_steps)}
    tensors = {name: np.ascontiguousarray(value, np.float32) for name, value in state.tensors.items()}
    try:
        with refusals(file):
            file.parent.mkdir(parents=True, exist_ok=True)
            with replacing(file, synced=True) as part:
                save_file(tensors, part, metadata)
            return file.stat().st_size
    except SafetensorError as error:
        raise JournalError(f"{file}: {error}. Make room; it is tried again.") from error


def read_state(file: Path, *, with_optimizer: bool = True) -> AdapterState:
    """Read a state; without optimizer its weights alone. Raises `DataError`, `JournalError`."""
    with _opened(file) as source:
        spec, num_steps = _metadata(source)
        names = [name for name in source.keys() if with_optimizer or name.startswith("weights/")]  # noqa: SIM118
        tensors = {name: source.get_tensor(name) for name in names}
    return AdapterState(spec, tensors, num_steps if with_optimizer else 0)


def read_spec(file: Path) -> AdapterSpec:
    """The spec alone. Raises `DataError`, `JournalError`."""
    with _opened(file) as source:
        return _metadata(source)[0]


@contextlib.contextmanager
def _opened(file: Path) -> Iterator[Any]:
    try:
        with refusals(file), file.open("rb"), safe_open(file, framework="numpy") as source:  # which names no cause
            yield source
    except (JournalError, SafetensorError, KeyError, ValueError, TypeError) as error:
        if isinstance(error, JournalError) and file.exists():
            raise
        raise DataError(f"{file.name} cannot be read: {error}.") from error


def _metadata(source: Any) -> tuple[AdapterSpec, int]:
    metadata = source.metadata()
    return AdapterSpec(**json.loads(metadata["spec"])), int(metadata["num_steps"])

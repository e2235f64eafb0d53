"""Adapters that come by name, as engines take them: split into A and B by layer, checked, and written for vLLM."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from penstock.conf.errors import DataError
from penstock.conf.trainer import LoraConfig
from penstock.workers.protocols import AdapterLimits, AdapterState
from penstock.workers.weights.publication.adapter import (
    CONFIG_NAME,
    FILE_NAME,
    LETTERS,
    last_parts,
    layer_of,
    peft_config,
    tensor_name,
)

Shape = tuple[int, int]


def split_factors(state: AdapterState) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """A `[rank, in]` and B `[out, rank]` of each layer, float32. Raises `DataError` where one of the two is missing,
    and for a tensor that is neither."""
    weights = state.weights()
    try:
        layers = dict.fromkeys(layer_of(name) for name in weights)
        return {layer: tuple(weights[tensor_name(layer, letter)] for letter in LETTERS) for layer in layers}  # type: ignore[misc]
    except KeyError as error:
        raise DataError(f"an adapter has no tensor {error}; it needs A and B of each layer.") from None
    except ValueError as error:
        raise DataError(f"an adapter has {error}, which is neither A nor B of a layer.") from None


def check_adapter(
    name: str, state: AdapterState, shape_of: Callable[[str], Shape | None], limits: AdapterLimits | None
) -> None:
    """Check that an engine can serve an adapter. `shape_of`: from a layer's name to its `(out, in)`; None for one that
    has no adapter. Raises `DataError`."""
    rank = state.spec.rank
    if limits is not None and rank > limits.max_rank:
        raise DataError(f"adapter {name!r}: rank {rank} is more than serve.max_rank={limits.max_rank}.")
    for layer, (a, b) in split_factors(state).items():
        shape = shape_of(layer)
        if shape is None:
            raise DataError(f"adapter {name!r}: the engine serves no adapter of {layer!r}.")
        if a.shape != (rank, shape[1]) or b.shape != (shape[0], rank):
            raise DataError(
                f"adapter {name!r}: A {list(a.shape)} and B {list(b.shape)} of {layer!r} do not fit its weights "
                f"{list(shape)} at rank {rank}. Is it of another model?"
            )


def check_whole(name: str, state: AdapterState, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Check that a whole model's weights are those of the engine's model. Raises `DataError`."""
    weights = state.weights()
    wrong = sorted(
        key for key in {*weights, *shapes} if key not in weights or shapes.get(key) != tuple(weights[key].shape)
    )
    if wrong:
        raise DataError(
            f"weights {name!r}: {wrong[0]} is not there or has another shape than the engine's. Is it of another model?"
        )


def write_peft(directory: Path, state: AdapterState) -> None:
    directory.mkdir()
    for name, data in peft_files(state).items():
        (directory / name).write_bytes(data)


def peft_files(state: AdapterState) -> dict[str, bytes]:
    """Files of an adapter as PEFT writes them: its tensors, and its rank and alpha, by which vLLM scales it."""
    from safetensors.numpy import save

    config = LoraConfig(rank=state.spec.rank, alpha=state.spec.alpha, target_modules=last_parts(split_factors(state)))
    tensors = {name: np.ascontiguousarray(value) for name, value in state.weights().items()}
    return {FILE_NAME: save(tensors), CONFIG_NAME: json.dumps(peft_config(config)).encode()}

"""Plain data: values as JSON and back, exactly, and nothing else. The text that is read cannot run code, whatever its
source. The states that per-batch functions carry from step to step (`Dataflow.compute(state=…)`) are plain data.

`encode` takes None, bool, int, float (NaN and infinities too), str, bytes, list, tuple, dict, numpy arrays and scalars
of numbers, and torch tensors on the CPU. It refuses anything else, and names its place in the value. `decode` gives
equal values of the same types and dtypes. Made for files that outlive a process, and for messages of less trusted
processes; large arrays have better forms (Arrow, safetensors).

    {"loss": (0.5, nan)}  ─▶  {"dict": [["loss", {"tuple": [0.5, {"float": "7ff8000000000000"}]}]]}

A JSON object has one key, which says what it stands for. numpy and torch are imported where one of theirs is met.

A carried state is plain data, or a dataclass of plain fields. Of a dataclass the fields are kept; its class is the one
that the stage of the resumed run starts with, so a checkpoint never says what is to be made.
"""

import base64
import dataclasses
import json
import math
import struct
import sys
from collections.abc import Callable, Mapping
from typing import Any

from penstock.conf.errors import CheckpointError, DataflowError, NotPlainData, PenstockError

MAX_DEPTH = 64
"""Depth of containers within containers: neither writer nor reader may run out of stack."""
JSON_INT = 2**63
"""Larger integers are written in hexadecimal: decimal ones take quadratic time, and Python refuses long ones."""
NUMBERS = "biufc"
"""The kinds of numpy dtypes that are plain bytes."""
INTS = [f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)]
TENSORS = frozenset(["bool", *INTS, "float16", "bfloat16", "float32", "float64", "complex64", "complex128"])
"""torch's dtypes that are plain bytes. torch may crash where bytes claim to be of another one."""
KNOWN = "None, bool, int, float, str, bytes, list, tuple, dict, numpy arrays and torch tensors"
ADVICE = (
    "Checkpoints keep it: let the stage's state be such data or a dataclass of it, or set checkpoint.every_steps=0."
)


def encode(value: Any) -> str:
    """Encode a value. Raises `NotPlainData` with the key and type of what cannot be written, and what to do."""
    return json.dumps(_tree(value, "", 0), allow_nan=False)


def decode(text: str | bytes) -> Any:
    """Decode a value. Raises `NotPlainData` for text that `encode` does not write."""
    try:
        return _value(json.loads(text), 0)
    except NotPlainData:
        raise
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RuntimeError, struct.error) as error:
        raise NotPlainData(f"the text is no plain data: {type(error).__name__}: {error}"[:300]) from None


def states_to_text(states: Mapping[str, Any], starts: Mapping[str, Any]) -> str:
    """Encode the states. `states`: by the names of their stages. `starts`: what those stages started with. Raises
    `DataflowError` for a state that cannot be kept."""
    return encode({name: _kept(name, state, starts[name]) for name, state in states.items()})


def states_from_text(text: str, starts: Mapping[str, Any]) -> dict[str, Any]:
    """Decode the states. Raises `CheckpointError` for states of other stages, or of another kind than theirs."""
    try:
        found = decode(text)
    except NotPlainData as error:
        raise CheckpointError(f"what is carried from step to step cannot be read: {error}") from None
    if not isinstance(found, dict) or found.keys() != starts.keys():
        names = sorted(map(str, found)) if isinstance(found, dict) else type(found).__name__
        raise CheckpointError(
            f"it holds the states of {names}, and this dataflow's stages with a state are {sorted(starts)}. Resume "
            "with the algorithm that wrote it."
        )
    return {name: _restored(name, found[name], start) for name, start in starts.items()}


def _tree(value: Any, place: str, depth: int) -> Any:
    """The JSON tree of a value. `place`: the path to the value, as one writes it behind a name: ["loss"][1]."""
    if depth > MAX_DEPTH:
        raise NotPlainData(f"{_where(place)} lies deeper than {MAX_DEPTH} containers, or contains itself. Flatten it.")
    match value:  # exact types below: what is derived from one would come back as another
        case None | True | False:
            return value
        case _ if type(value) is str:
            return _text(value, place)
        case _ if type(value) is int:
            return value if -JSON_INT <= value < JSON_INT else {"int": hex(value)}
        case _ if type(value) is float:
            return value if math.isfinite(value) else {"float": struct.pack(">d", value).hex()}
        case _ if type(value) is bytes:
            return {"bytes": _base64(value)}
        case _ if type(value) is list:
            return [_tree(item, f"{place}[{index}]", depth + 1) for index, item in enumerate(value)]
        case _ if type(value) is tuple:
            return {"tuple": [_tree(item, f"{place}[{index}]", depth + 1) for index, item in enumerate(value)]}
        case _ if type(value) is dict:
            return {"dict": [_pair(key, item, place, depth + 1) for key, item in value.items()]}
    return _array(value, place)


def _pair(key: Any, value: Any, place: str, depth: int) -> list[Any]:
    inside = f"{place}[{key!r:.60}]"
    return [_tree(key, f"{inside} (the key)", depth), _tree(value, inside, depth)]


def _text(value: str, place: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError:
        raise NotPlainData(f"{_where(place)} is a str that UTF-8 cannot write. Keep it as bytes.") from None
    return value


def _array(value: Any, place: str) -> Any:
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")  # a value of theirs has imported them
    if numpy is not None and type(value) is numpy.ndarray and value.dtype.kind in NUMBERS:
        return {"array": [value.dtype.str, list(value.shape), _base64(value.tobytes())]}
    if numpy is not None and isinstance(value, numpy.generic) and value.dtype.kind in NUMBERS:
        return {"scalar": [value.dtype.str, _base64(value.tobytes())]}
    if torch is not None and type(value) is torch.Tensor:
        return {"tensor": _tensor(value, place, torch)}
    kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
    dtype = f" of {value.dtype}" if hasattr(value, "dtype") else ""
    raise NotPlainData(f"{_where(place)} is of type {kind}{dtype}; plain data is {KNOWN}. Make it one of these.")


def _tensor(tensor: Any, place: str, torch: Any) -> list[Any]:
    dtype = str(tensor.dtype).removeprefix("torch.")
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided or dtype not in TENSORS:
        raise NotPlainData(
            f"{_where(place)} is a tensor of {dtype} on {tensor.device}, {tensor.layout}; plain data is a dense one of "
            "common numbers on the CPU. Keep it as tensor.to_dense().float().cpu()."
        )
    if tensor.requires_grad:
        raise NotPlainData(f"{_where(place)} is a tensor that requires a gradient. Keep it as tensor.detach().")
    values = tensor.resolve_conj().resolve_neg().contiguous().flatten().view(torch.uint8).numpy()
    return [dtype, list(tensor.shape), _base64(values.tobytes())]


def _where(place: str) -> str:
    return place or "the value"


def _value(tree: Any, depth: int) -> Any:
    if depth > MAX_DEPTH:
        raise NotPlainData(f"the text has more than {MAX_DEPTH} containers within each other.")
    if isinstance(tree, list):
        return [_value(item, depth + 1) for item in tree]
    if not isinstance(tree, dict):
        return tree
    ((kind, content),) = tree.items()
    if kind == "tuple":
        return tuple(_value(item, depth + 1) for item in content)
    if kind == "dict":
        return {_value(key, depth + 1): _value(item, depth + 1) for key, item in content}
    return LEAVES[kind](content)


def _read_bytes(text: str) -> bytes:
    return base64.b64decode(text, validate=True)


def _read_array(content: list[Any]) -> Any:
    import numpy

    name, shape, text = content
    dtype = numpy.dtype(str(name))
    if dtype.kind not in NUMBERS:
        raise NotPlainData(f"the text has an array of {dtype}, which is no plain data.")
    return numpy.frombuffer(_read_bytes(text), dtype).reshape(_shape(shape)).copy()


def _read_tensor(content: list[Any]) -> Any:
    import torch

    name, shape, text = content
    if name not in TENSORS:
        raise NotPlainData(f"the text has a tensor of {name!r:.60}, which is no plain data.")
    dtype = getattr(torch, name)
    data = bytearray(_read_bytes(text))
    flat = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
    return flat.reshape(_shape(shape))


def _shape(sizes: list[Any]) -> tuple[int, ...]:
    """The sizes as a shape. They are checked: a negative size would be guessed from the others."""
    if any(type(size) is not int or size < 0 for size in sizes):
        raise NotPlainData(f"the text has an array of shape {sizes!r:.60}.")
    return tuple(sizes)


def _base64(value: bytes) -> str:
    return base64.b64encode(value).decode()


LEAVES: dict[str, Callable[[Any], Any]] = {
    "int": lambda digits: int(digits, 16),
    "float": lambda digits: struct.unpack(">d", bytes.fromhex(digits))[0],
    "bytes": _read_bytes,
    "array": _read_array,
    "scalar": lambda content: _read_array([content[0], [], content[1]])[()],
    "tensor": _read_tensor,
}


def _kept(name: str, state: Any, start: Any) -> Any:
    """The plain data that is written of a state."""
    if dataclasses.is_dataclass(start) and type(state) is type(start):
        fields = dataclasses.fields(start)
        derived = [field.name for field in fields if not field.init]
        if derived:
            raise DataflowError(
                f"stage {name!r}: its state's field {derived[0]!r} is not one to make it from. {ADVICE}"
            )
        state = {field.name: getattr(state, field.name) for field in fields}
    elif dataclasses.is_dataclass(state) and not isinstance(state, type):
        raise DataflowError(
            f"stage {name!r}: its state is a {type(state).__name__} now and started as {type(start).__name__}; a "
            "resumed run makes it from its fields, by the class that it starts with. Start with that class."
        )
    try:
        encode(state)
    except NotPlainData as error:
        raise DataflowError(f"stage {name!r}: of its state, {error} {ADVICE}") from None
    return state


def _restored(name: str, state: Any, start: Any) -> Any:
    if not dataclasses.is_dataclass(start) or isinstance(start, type):
        return state
    try:
        return type(start)(**state)
    except (TypeError, ValueError, PenstockError) as error:
        raise CheckpointError(
            f"the state of stage {name!r} makes no {type(start).__name__} ({error}). Resume with the algorithm that "
            "wrote it."
        ) from None

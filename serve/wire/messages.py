"""The protobuf messages of the Tinker SDK, and the tensors in them. The messages are those of the installed `tinker`
wheel: its one module of messages is loaded when the first one is needed, and nothing else of it.

A tensor comes in one of two forms, dense or sparse (CSR, for `[T, K]` targets with few entries that are not zero), as
protobuf with bytes or as JSON with numbers. Here both become numpy arrays.
"""

import importlib
import importlib.metadata
from functools import cache
from importlib.machinery import SourceFileLoader
from types import ModuleType
from typing import Any

import numpy as np

from penstock.conf.errors import ConfigError
from penstock.serve.wire.bodies import MOST_FIELDS, MOST_RATIO, PLAIN_BYTES, Tensor, TooLarge, check_size
from penstock.workers.gateway.http.errors import BadRequest

PROTOBUF = "application/x-protobuf"
JSON = "application/json"
LARGEST_TENSOR = 2**28
"""Most elements of a tensor, so that a small sparse one cannot ask for all memory."""


@cache
def messages() -> Any:
    """The module of the messages. Raises `ConfigError` without the extra."""
    try:
        file = importlib.metadata.distribution("tinker").locate_file("tinker/proto/tinker_public_pb2.py")
        loader = SourceFileLoader("penstock_tinker_messages", str(file))
        module = ModuleType(loader.name)
        loader.exec_module(module)
        importlib.import_module("zstandard")  # which bodies are packed by
    except (ImportError, FileNotFoundError) as error:
        raise ConfigError(
            f"{error}: the server speaks the messages of the Tinker SDK, which come with the extra: pip install "
            "'penstock[serve]'."
        ) from None
    return module


def unpacked(body: bytes, encoding: str, limit_bytes: int) -> bytes:
    """The body of a request as it was before its `Content-Encoding`. Raises `BadRequest`, `TooLarge`."""
    import zstandard

    if encoding in ("", "identity"):
        return body
    if encoding != "zstd":
        raise BadRequest(f"Content-Encoding {encoding!r} is unknown: send zstd, or none.")
    limit_bytes = min(limit_bytes, max(PLAIN_BYTES, MOST_RATIO * len(body)))
    try:
        with zstandard.ZstdDecompressor().stream_reader(body) as reader:
            data: bytes = reader.read(limit_bytes + 1)
    except zstandard.ZstdError as error:
        raise BadRequest(f"the body is no zstd: {error}.") from None
    check_size(len(data), limit_bytes)
    return data


def check_fields(name: str, body: bytes) -> None:
    """Raise `TooLarge` for a large message of many small fields, whose parser would hold up everybody else."""
    kind = getattr(messages(), name).DESCRIPTOR
    try:
        if len(body) > PLAIN_BYTES and _num_fields(memoryview(body), kind) > MOST_FIELDS:
            raise TooLarge(f"the body has more than {MOST_FIELDS:,} fields. Send fewer sequences at once.")
    except (IndexError, RecursionError):
        raise BadRequest(f"the body is no {name} in protobuf: it is torn.") from None


def _num_fields(data: memoryview, kind: Any) -> int:
    """Number of fields of a message and of those in it, up to `MOST_FIELDS` and one."""
    num = at = 0
    while at < len(data) and num <= MOST_FIELDS:
        tag, at = _varint(data, at)
        wire, num = tag & 7, num + 1
        if wire in (0, 2):
            value, at = _varint(data, at)
        if wire == 2:
            field = kind.fields_by_number.get(tag >> 3)
            if field is not None and field.message_type is not None:
                num += _num_fields(data[at : at + value], field.message_type)
            at += value
        at += {1: 8, 5: 4}.get(wire, 0)
    return num


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    """A number of base 128, which has ten digits at most, and the offset behind it. Raises `IndexError`."""
    value = 0
    for place in range(10):
        digit = data[at + place]
        value |= (digit & 127) << 7 * place
        if digit < 128:
            return value, at + place + 1
    raise IndexError


def parsed_message(name: str, body: bytes) -> Any:
    """A message of the SDK by the name of its type."""
    message = getattr(messages(), name)()
    try:
        message.ParseFromString(body)
    except Exception as error:  # noqa: BLE001 - protobuf's DecodeError has no public place that all versions share
        raise BadRequest(f"the body is no {name} in protobuf: {error}.") from None
    return message


def array_of_message(tensor: Any, field: str) -> np.ndarray:
    """The array of a `Tensor`: float32 or int64, of its shape."""
    pb = messages()
    dtypes = {pb.DTYPE_FLOAT32: "<f4", pb.DTYPE_INT64: "<i8", pb.DTYPE_INT32: "<i4"}
    if tensor.dtype not in dtypes:
        raise BadRequest("must be float32, int64 or int32.", field)
    dtype, shape = np.dtype(dtypes[tensor.dtype]), list(tensor.shape)
    if tensor.WhichOneof("encoding") == "sparse_csr":
        csr = tensor.sparse_csr
        rows, columns = np.frombuffer(csr.crow_indices, "<i8"), np.frombuffer(csr.col_indices, "<i8")
        found = _dense(numbers(csr.values, dtype, field), rows, columns, shape, field)
    else:
        found = _shaped(numbers(tensor.dense, dtype, field), shape or None, field)
    return found.astype(np.float32 if dtype.kind == "f" else np.int64)


def array_of_body(tensor: Tensor, field: str, absent: int = 0) -> np.ndarray:
    """The array of a tensor in JSON: float32 or int64, of its shape. `absent`: the value of gaps in a sparse one."""
    values = np.asarray(tensor.data)
    if len(values) and values.dtype.kind not in ("iuf" if tensor.dtype == "float32" else "iu"):
        raise BadRequest(f"must be numbers of {tensor.dtype}.", f"{field}.data")
    values = values.astype(tensor.dtype)
    if tensor.sparse_crow_indices is not None:
        rows, columns = np.asarray(tensor.sparse_crow_indices), np.asarray(tensor.sparse_col_indices or [], np.int64)
        return _dense(values, rows, columns, tensor.shape or [], field, absent)
    return _shaped(values, tensor.shape, field)


def tensor_message(value: np.ndarray, is_there: np.ndarray | None = None) -> Any:
    """A `Tensor` of real numbers: dense, or sparse with those of a matrix at the places that are there."""
    pb = messages()
    if is_there is None:
        return pb.Tensor(dense=value.astype("<f4").tobytes(), dtype=pb.DTYPE_FLOAT32, shape=list(value.shape))
    rows, columns = np.nonzero(is_there)
    starts = np.concatenate([[0], np.cumsum(is_there.sum(axis=1))])
    csr = pb.SparseCsr(
        values=value[rows, columns].astype("<f4").tobytes(),
        crow_indices=starts.astype("<i8").tobytes(),
        col_indices=columns.astype("<i8").tobytes(),
    )
    return pb.Tensor(sparse_csr=csr, dtype=pb.DTYPE_FLOAT32, shape=list(value.shape))


def numbers(data: bytes, dtype: np.dtype[Any], field: str) -> np.ndarray:
    """The array that bytes are. Raises `BadRequest`."""
    if len(data) % dtype.itemsize:
        raise BadRequest(f"has {len(data)} bytes, which is no whole number of {dtype.name}.", field)
    return np.frombuffer(data, dtype)


def _shaped(values: np.ndarray, shape: list[int] | None, field: str) -> np.ndarray:
    if shape is None:
        return values
    if any(size < 0 for size in shape) or int(np.prod(shape, dtype=object)) != len(values):
        raise BadRequest(f"has {len(values)} values, which do not fill its shape {shape}.", field)
    return values.reshape(shape)


def _dense(
    values: np.ndarray, rows: np.ndarray, columns: np.ndarray, shape: list[int], field: str, absent: int = 0
) -> np.ndarray:
    """The matrix of a sparse tensor."""
    if len(shape) != 2 or min(shape) < 0 or shape[0] * shape[1] > LARGEST_TENSOR:
        raise BadRequest(f"a sparse tensor has two dimensions that fit in memory, not {shape}.", field)
    is_ordered = len(rows) == shape[0] + 1 and rows[0] == 0 and (np.diff(rows) >= 0).all() and rows[-1] == len(values)
    is_within = len(columns) == len(values) and ((columns >= 0) & (columns < shape[1])).all()
    if not is_ordered or not is_within:
        raise BadRequest("the indices of this sparse tensor do not fit its shape and values.", field)
    found = np.full(shape, absent, values.dtype)
    found[np.repeat(np.arange(shape[0]), np.diff(rows)), columns] = values
    return found

"""Hashes of what a step has trained on, by which two runs are compared bit for bit.

    rows of each rank ─▶ row_hashes ─▶ StepReport.hashes ─▶ added over ranks ─▶ `hash/<quantity>` in metrics.jsonl

A row's hash is the xxh3-128 of its id and of the bytes of its columns. Hashes are added modulo 2^128, so that neither
the order of rows nor their split over ranks changes the sum. Two runs have the same sum if their rows have the same
bits, else they differ but for a chance of 2^-128. No adversary is expected. Without torch.
"""

import struct
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import xxhash

from penstock.store.data.rows import Rows

QUANTITIES = ("prompts", "tokens", "logprobs", "rewards", "advantages", "gradients", "weights")
"""The quantities of a step in the order in which one follows from those before it."""
MODULUS = 2**128
OF_COLUMN = {
    **dict.fromkeys(("prompt_ids", "task", "pictures", "picture_ranges", "hinted_ids"), "prompts"),
    **dict.fromkeys(
        ("response_ids", "context_ids", "spans", "turn_tokens", "token_temperatures", "seen_pictures", "seen_ranges"),
        "tokens",
    ),
    **dict.fromkeys(("turn_states", "policy"), "tokens"),
    **dict.fromkeys(("candidate_ids", "teacher_candidates", "routed_experts"), "logprobs"),
    **dict.fromkeys(("turn_rewards", "preferred", "desirable"), "rewards"),
}
"""The quantity of a column. Other columns belong to `logprobs` or `rewards` by their names, else to `advantages`: they
are computed by the dataflow."""
LEFT_OUT = frozenset({"token_versions", "turn_ids", "transcript", "response_text", "greedy_text", "finish_reason"})
"""Columns that depend on timing, or repeat tokens as text."""


def row_hashes(rows: Rows) -> dict[str, int]:
    """The sum of the rows' hashes modulo 2^128, by quantity; quantities without a column are absent."""
    columns: dict[str, list[str]] = {}
    for name in sorted(rows.names):
        if name not in LEFT_OUT:
            columns.setdefault(_quantity_of(name), []).append(name)
    return {quantity: _sum_over_rows(rows, names) for quantity, names in columns.items()}


def added(parts: Iterable[dict[str, int]]) -> dict[str, int]:
    """The sums of several ranks, modulo 2^128.

    >>> added([{"tokens": 2**128 - 1}, {"tokens": 3, "weights": 5}])
    {'tokens': 2, 'weights': 5}
    """
    total: dict[str, int] = {}
    for part in parts:
        for name, value in part.items():
            total[name] = (total.get(name, 0) + value) % MODULUS
    return total


def hash_of_norms(norms: Sequence[float]) -> int:
    """Hash of the bits of an update's gradient norms, in their order."""
    return int(xxhash.xxh3_128_intdigest(struct.pack(f"<{len(norms)}d", *norms)))


def _quantity_of(column: str) -> str:
    if column in OF_COLUMN:
        return OF_COLUMN[column]
    ending = next((name for name in ("logprobs", "reward") if column.endswith(name)), "")
    return {"logprobs": "logprobs", "reward": "rewards"}.get(ending, _by_beginning(column))


def _by_beginning(column: str) -> str:
    return "rewards" if column.startswith("reward_") else "advantages"


def _sum_over_rows(rows: Rows, names: Sequence[str]) -> int:
    ids = rows.row_ids.astype("<i8").tobytes()
    columns = [_bytes_of_rows(rows[name]) if len(rows) else [] for name in names]
    total = 0
    for index, parts in enumerate(zip(*columns, strict=True)):
        sizes = struct.pack(f"<{len(parts)}q", *map(len, parts))
        total += xxhash.xxh3_128_intdigest(b"".join((ids[8 * index : 8 * index + 8], sizes, *parts)))
    return total % MODULUS


def _bytes_of_rows(column: Any) -> list[bytes | memoryview]:
    """The bytes of each row's value, of a column as `Rows` gives it: numbers, arrays, texts, blobs, or lists of
    blobs."""
    if isinstance(column, np.ndarray):
        data = np.ascontiguousarray(column).tobytes()
        return [data[start:end] for start, end in pairwise(range(0, len(data) + 1, column.itemsize))]
    return [_bytes_of(value) for value in column]


def _bytes_of(value: Any) -> bytes | memoryview:
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, np.ndarray):
        return np.ascontiguousarray(value).tobytes()
    if isinstance(value, list):
        return b"".join(struct.pack("<q", len(one)) + bytes(one) for one in value)
    return bytes(value) if value is not None else b""

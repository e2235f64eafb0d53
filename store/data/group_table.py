"""The ledger's groups as an Arrow table, one row each. For snapshots."""

from collections.abc import Iterator

import pyarrow as pa

from penstock.store.ledger.group import Group
from penstock.store.ledger.state import values_of

GROUPS_AT_ONCE = 256
_LISTS = pa.list_(pa.int64())
GROUPS = pa.schema(
    [
        ("id", pa.int64()),
        ("live", pa.binary()),
        ("have", pa.list_(pa.binary())),
        ("done", pa.list_(pa.binary())),
        ("prompt_tokens", pa.int64()),
        ("shared_bytes", pa.int64()),
        ("oldest", _LISTS),
        ("response_tokens", _LISTS),
        ("context_tokens", _LISTS),
        ("row_bytes", _LISTS),
    ]
)


def groups_batches(groups: list[Group], size: int) -> Iterator[pa.RecordBatch]:
    """Iterate over a few hundred at a time: Arrow lets no other thread of Python run meanwhile. At least one batch."""
    for start in range(0, max(1, len(groups)), GROUPS_AT_ONCE):
        some = [values_of(group, size) for group in groups[start : start + GROUPS_AT_ONCE]]
        yield pa.RecordBatch.from_pylist(some, schema=GROUPS)

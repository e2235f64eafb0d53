"""The ledger's groups as an Arrow table, one row each. For snapshots."""

import pyarrow as pa

from penstock.store.ledger.group import Group
from penstock.store.ledger.state import values_of

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


def groups_table(groups: list[Group], size: int) -> pa.Table:
    return pa.Table.from_pylist([values_of(group, size) for group in groups], schema=GROUPS)

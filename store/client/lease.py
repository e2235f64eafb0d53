"""The rows of a stage that a worker holds, to be computed and written."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.store.data.rows import Rows

Values = dict[str, Any]
"""Values by column, one a row: a list or `[N]` array; for ragged columns a list of lists or of `[T_i]` arrays."""


@dataclass(frozen=True)
class Lease:
    """Rows to compute for a stage. `rows` has the columns that the stage reads."""

    id: int
    stage: str
    rows: Rows


@dataclass(frozen=True)
class Share:
    """The name of one rank's part of a round: `lease` is the round's, `rank` whose part."""

    lease: int
    rank: int


@dataclass(frozen=True)
class SharedLease(Lease):
    """A rank's share of a round; `rows` may be empty. `version`: the one that the step begins with (train)."""

    round: int = 0
    rank: int = 0
    version: int = 0

    @property
    def share(self) -> Share:
        return Share(self.id, self.rank)


def ids_of(row_ids: "Sequence[int] | np.ndarray") -> list[int]:
    """Row ids as the store takes them."""
    return list(map(int, row_ids.tolist() if isinstance(row_ids, np.ndarray) else row_ids))

"""Several datasets as one, each with its share of the prompts."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from penstock.conf.errors import DataError
from penstock.workers.prompts.task import PromptDataset, Task, is_cut

MOST_ROWS = 10_000_000
"""Largest number of rows of a mixture: with very different weights, small parts would be repeated very often."""


class Mixture:
    """Datasets in a mixture. Any stretch of its rows has about its share of each part; every part is gone through
    whole, in its own order, and small ones again and again. The row's `data_source` has the part's name, as verl's rows
    have it."""

    def __init__(self, parts: Mapping[str, PromptDataset], weights: Mapping[str, float]) -> None:
        """Mix the parts. Raises `DataError` for a mixture that would be too long."""
        self._names = list(parts)
        self._parts = [parts[name] for name in self._names]
        self.is_cut = any(is_cut(part) for part in self._parts)
        total = sum(weights.values())
        shares = [weights[name] / total for name in self._names]
        longest = max(len(part) / share for part, share in zip(self._parts, shares, strict=True))
        if longest > MOST_ROWS:
            raise DataError(
                f"data.mixture: until each part was gone through, {longest:,.0f} rows would be drawn. Bring the "
                "weights closer together, or limit the largest part: size."
            )
        self._places = dealt(shares, round(longest))

    def __len__(self) -> int:
        return len(self._places)

    def row(self, index: int) -> Task:
        number, turn = self._places[index]
        part = self._parts[number]
        task = part.row(turn % len(part))
        return replace(task, index=index, extra={"data_source": self._names[number], **task.extra})


def dealt(shares: Sequence[float], count: int) -> list[tuple[int, int]]:
    """Choose a part for each of so many rows, and which of its turns it is: always the part that lags most behind its
    share.

    >>> dealt([0.75, 0.25], 4)
    [(0, 0), (0, 1), (1, 0), (0, 2)]
    """
    given = [0] * len(shares)
    places = []
    for row in range(1, count + 1):
        number = max(range(len(shares)), key=lambda part: (shares[part] * row - given[part], -part))
        places.append((number, given[number]))
        given[number] += 1
    return places

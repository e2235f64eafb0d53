"""The order in which prompts are drawn: endless, shuffled anew each epoch, and resumable from two numbers. Pure.

The cursor goes into checkpoints.
"""

from dataclasses import dataclass

import numpy as np

from penstock.conf.errors import DataError


@dataclass(frozen=True)
class PromptCursor:
    """The position in the order: `position` rows of epoch `epoch` have been drawn."""

    epoch: int = 0
    position: int = 0

    def to_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "position": self.position}

    @classmethod
    def from_dict(cls, value: dict[str, int]) -> "PromptCursor":
        return cls(int(value["epoch"]), int(value["position"]))


def _mixed(values: np.ndarray) -> np.ndarray:
    """Mix bits by splitmix64's finaliser (Steele et al. 2014): 64 random bits from each integer, the same
    everywhere."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def epoch_order(num_rows: int, seed: int, epoch: int, shuffle: bool = True) -> np.ndarray:
    """A permutation of the rows, `[num_rows]` int64, that depends on nothing but the arguments."""
    rows = np.arange(num_rows, dtype=np.uint64)
    if not shuffle:
        return rows.astype(np.int64)
    golden = 0x9E3779B97F4A7C15
    start = _mixed(np.array([(seed * golden + epoch) % 2**64], dtype=np.uint64))
    start = _mixed(start + np.uint64(epoch % 2**32))
    keys = _mixed(start + (rows + np.uint64(1)) * np.uint64(golden))
    return np.argsort(keys, kind="stable").astype(np.int64)


def chance(seed: int, cursor: PromptCursor) -> float:
    """A number in [0, 1) for the row after this cursor, that depends on nothing but the arguments."""
    golden = 0x9E3779B97F4A7C15
    start = _mixed(np.array([(seed * golden + cursor.epoch + 1) % 2**64], dtype=np.uint64))
    return float(_mixed(start ^ _mixed(np.array([cursor.position + 1], dtype=np.uint64)))[0] >> np.uint64(11)) / 2**53


class PromptOrder:
    """Row numbers in order, from a cursor on.

    order = PromptOrder(num_rows=3, seed=0)
    order.next(), order.cursor    # 2, PromptCursor(epoch=0, position=1)
    """

    def __init__(
        self,
        num_rows: int,
        seed: int,
        cursor: PromptCursor | None = None,
        *,
        shuffle: bool = True,
        first_rows: int | None = None,
    ) -> None:
        """`first_rows`: number of rows of the cursor's epoch, if there were fewer when it began."""
        if num_rows < 1:
            raise DataError("the dataset has no rows (data.path): nothing to draw prompts from.")
        self.num_rows, self.seed, self.shuffle = num_rows, seed, shuffle
        self.cursor = cursor or PromptCursor()
        self._first_epoch, self._first_rows = self.cursor.epoch, first_rows or num_rows
        self._rows = self._order_of(self.cursor.epoch)

    def go_to(self, cursor: PromptCursor) -> None:
        """Continue with the row after this cursor."""
        if cursor.epoch != self.cursor.epoch:
            self._rows = self._order_of(cursor.epoch)
        self.cursor = cursor

    def skip(self, count: int) -> None:
        """Skip rows, as if so many had been drawn."""
        left = len(self._rows) - self.cursor.position
        if len(self._rows) != self.num_rows and count > left:
            self.go_to(PromptCursor(self.cursor.epoch + 1, 0))
            count -= left
        if count:
            epochs, last = divmod(self.cursor.position + count - 1, self.num_rows)
            self.go_to(PromptCursor(self.cursor.epoch + epochs, last + 1))

    def next(self) -> int:
        if self.cursor.position >= len(self._rows):
            self.go_to(PromptCursor(self.cursor.epoch + 1, 0))
        row = int(self._rows[self.cursor.position])
        self.cursor = PromptCursor(self.cursor.epoch, self.cursor.position + 1)
        return row

    def _order_of(self, epoch: int) -> np.ndarray:
        num_rows = self._first_rows if epoch <= self._first_epoch else self.num_rows
        return epoch_order(num_rows, self.seed, epoch, self.shuffle)

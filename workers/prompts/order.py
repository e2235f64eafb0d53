"""The order in which prompts are drawn: endless, shuffled anew each epoch, and resumable from two numbers, the cursor,
which goes into checkpoints; and a curriculum, which passes rows over by the outcomes of earlier groups of their level.
Pure.

    store ─ outcomes of groups ─▶ hear ─▶ begin(group): levels, weights ─▶ takes(row) ─▶ drew(level)
                                             phases by step ─┘

A level's weight is the spread of the rewards within its groups, beside the largest of any level: groups whose samples
all have one reward have no advantage, whether they are solved or hopeless (learnability, p(1-p), of Foster et al. 2024
for rewards of 0 and 1). A row is taken where a number that depends on the seed and its place in the order lies below
its level's weight.

What the groups of a step are drawn by is fixed: the outcomes of all groups that can have ended by then whatever the
timing, those of the step before with `max_staleness=0`. So a run that is resumed, or whose members die, draws the same.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from penstock.algorithms.graph.columns import field_in, fields_of
from penstock.conf.data import CurriculumConfig
from penstock.conf.errors import DataError, suggest
from penstock.store.ledger.outcomes import MOST_KNOWN, Outcome
from penstock.workers.prompts.dataset_row import DatasetRow

ROW = "row"
REMEMBERED_STATES = 64
"""Steps that drawing can go back by without beginning at the start."""
MOST_SHOWN = 12
"""Levels whose numbers are metrics."""


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


class Level(NamedTuple):
    """The rewards of a level's groups so far, the newest ones weigh most."""

    num_groups: int = 0
    mean: float = 0.0
    spread: float = 0.0
    """Standard deviation within a group."""

    def after(self, outcome: Outcome, memory: int) -> "Level":
        """The level after one more group: its mean until `memory` groups are there, then a moving one."""
        count = self.num_groups + 1
        rate = 1.0 / min(count, memory)
        mean, spread = outcome
        return Level(count, self.mean + rate * (mean - self.mean), self.spread + rate * (spread - self.spread))


@dataclass(frozen=True)
class CurriculumState:
    """All that the next draws depend on, beside the order: plain data, for checkpoints."""

    counted: int = 0
    """Number of groups whose outcomes are in `levels`: the first ones."""
    levels: Mapping[str, Level] = field(default_factory=dict)
    drawn: tuple[str, ...] = ()
    """Levels of the groups that were drawn since."""

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> "CurriculumState":
        """The state of which `asdict` made this."""
        levels = {name: Level(int(count), *numbers) for name, (count, *numbers) in value["levels"].items()}
        return cls(int(value["counted"]), levels, tuple(value["drawn"]))


class Curriculum:
    """Lifecycle: for each group `missing` and `hear`, `begin`, `takes` for each row in its turn until one is, `drew`.
    `go_to` begins again with an earlier group."""

    def __init__(
        self, config: CurriculumConfig, seed: int, groups_per_step: int, lag: int, start: CurriculumState | None = None
    ) -> None:
        """`lag`: groups before those of a step whose outcomes it does not wait for: they may have ended, or not.
        `start`: where a resumed run continues."""
        self._config, self._seed, self._step, self._lag = config, seed, groups_per_step, lag
        start = start or CurriculumState()
        self._start_group = start.counted + len(start.drawn)
        self._levels = dict(enumerate(start.drawn, start.counted))
        """Levels of groups, by number."""
        self._outcomes: dict[int, Outcome | None] = {}
        self._heard = start.counted
        """All groups before this one have been heard of."""
        self._start = start
        self._states: deque[tuple[int, CurriculumState]] = deque([(self._start_group, start)], maxlen=REMEMBERED_STATES)
        """The first group that is drawn by each state, and the state."""
        self._weights: dict[str, float] = {}
        self._group = self._start_group
        """Group that is drawn next."""
        self.num_passed_over = 0

    def missing(self, group: int) -> range:
        """Groups whose outcomes must be heard before this one is drawn."""
        return range(self._heard, max(self._heard, self._end(group)))

    def hear(self, outcomes: Sequence[Outcome | None]) -> None:
        """Hear the outcomes of the next groups; None: a group had no rewards."""
        self._outcomes.update(enumerate(outcomes, self._heard))
        self._heard += len(outcomes)
        for group in range(self._heard - len(outcomes) - MOST_KNOWN, self._heard - MOST_KNOWN):
            self._outcomes.pop(group, None)

    def begin(self) -> None:
        """Count what the next group is drawn by, if it is the first of its step, or of all."""
        state = self._states[-1][1]
        end = self._end(self._group)
        if state.counted >= end and self._weights:
            return
        levels = dict(state.levels)
        for group in range(state.counted, end):
            outcome, name = self._outcomes.get(group), self._levels.get(group)
            if outcome is not None and name is not None:
                levels[name] = levels.get(name, Level()).after(outcome, self._config.memory)
        if end > state.counted:
            self._states.append((self._group, CurriculumState(end, levels)))
            oldest = self._states[0][1].counted
            self._levels = {group: name for group, name in self._levels.items() if group >= oldest}
        largest = max((level.spread for level in levels.values()), default=0.0)
        floor = self._config.floor
        self._weights = {
            name: max(floor, level.spread / largest) if largest else 1.0 for name, level in levels.items()
        } or {"": 1.0}

    @property
    def left(self) -> int:
        """Number of groups of this step that are not drawn yet: they are drawn by the same outcomes."""
        return self._step - self._group % self._step

    @property
    def phase(self) -> Sequence[str]:
        """Levels that the next group may be of; none: all."""
        return phase_of(self._config, self._group // self._step)

    def takes(self, row: DatasetRow, place: PromptCursor, is_patient: bool) -> bool:
        """Return whether a row is taken, whose turn it is. `place`: the cursor after it. `is_patient`: False where so
        many were passed over that the next one of the phase is taken. Raises `DataError` for a row without a level."""
        level, phase = self._level_of(row), self.phase
        is_due = not phase or level in phase
        if is_due and (not is_patient or chance(self._seed, place) < self._weights.get(level, 1.0)):
            return True
        self.num_passed_over += 1
        return False

    def drew(self, row: DatasetRow) -> None:
        """Note the row of the group that was drawn."""
        self._levels[self._group] = self._level_of(row)
        self._group += 1

    def remembers(self, group: int) -> bool:
        """Return whether the state before this group is known."""
        return self._states[0][0] <= group

    def state_before(self, group: int) -> CurriculumState:
        """The state in which a run continues with this group, which is remembered, and was drawn or is the next."""
        state = next(state for first, state in reversed(self._states) if first <= group)
        return replace(state, drawn=tuple(self._levels[one] for one in range(state.counted, group)))

    def go_to(self, group: int) -> None:
        """Begin again with this group, which was drawn before, and whose state is known; or with the start's."""
        while len(self._states) > 1 and self._states[-1][0] > group:
            self._states.pop()
        if self._states[-1][0] > group:
            self._states[-1] = self._start_group, self._start
            self._levels.update(enumerate(self._start.drawn, self._start.counted))
        self._group, self._weights = group, {}

    def stats(self) -> dict[str, float]:
        """Weight and mean reward of each level, if they are few, and how many rows were passed over."""
        levels = self._states[-1][1].levels
        found: dict[str, float] = {"curriculum/passed_over": self.num_passed_over}
        for name, level in levels.items() if len(levels) <= MOST_SHOWN else ():
            found[f"curriculum/weight/{name}"] = self._weights.get(name, 1.0)
            found[f"curriculum/reward/{name}"] = level.mean
        return found

    def _level_of(self, row: DatasetRow) -> str:
        return level_of(row, self._config.by or ROW)

    def _end(self, group: int) -> int:
        """Groups before this one are counted when `group` is drawn."""
        return max(self._start.counted, group // self._step * self._step - self._lag)


def level_of(row: DatasetRow, by: str) -> str:
    """The level of a row: its own number, or the value of a field. Raises `DataError` if the row has none."""
    if by == ROW:
        return str(row.index)
    fields = fields_of(row.extra)
    if (found := field_in(fields, by)) is None:
        raise DataError(f"{row.where}: no value of {by!r}, which data.curriculum.by names{suggest(by, fields)}")
    return found


def phase_of(config: CurriculumConfig, step: int) -> Sequence[str]:
    """Levels that are drawn for a step, counted from 0; none: all."""
    for phase in config.phases.values():
        if phase.steps is None or step < phase.steps:
            return phase.levels
        step -= phase.steps
    return ()

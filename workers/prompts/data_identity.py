"""The identity of a run's data, and that of a problem.

    checkpoint ─ cursor, identity ─▶ the data of now ─▶ the same, or only grown: the cursor is kept
                                                     ─▶ other rows, another order: `data.on_change` says what then

Rows are known by 64 blocks of them, and files by their size besides: not by their place, which may be another.

Held-out problems are kept out of the training, for every data source and environment:

    held-out rows ─▶ HeldOutProblems: a digest of each ─▶ the source of prompts leaves out rows that are among them
                                                       ─▶ a check before the start: how many are, and an error for most

A problem is what the model is asked: two rows with the same conversation and pictures are the same one, whatever else
they hold, as text or as messages, and with any system message before it. `data.prompt_template` is part of it: where
the parts of a mixture have another one than the held-out rows, the same question is another problem. A task of an
environment is identified by its data, or by its own `Task.problem`.
"""

import datetime
import decimal
import hashlib
import itertools
import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from penstock.conf.data import DataConfig
from penstock.conf.errors import DataError
from penstock.workers.prompts.dataset_row import DataPart, DatasetRow, PromptDataset

BLOCKS, BLOCK_ROWS = 64, 16
MOST_LEFT_OUT = 0.5
"""Largest share of the rows to train on that may be held out. With more, what is left is no longer the data that was
asked for."""


@dataclass(frozen=True)
class PartIdentity:
    """The identity of one source of rows."""

    path: str
    rows: int
    num_bytes: int
    """Bytes of the files; 0: the rows are not all that a file has, or of none."""
    digest: str
    """Digest of 64 blocks of rows, evenly spread."""
    weight: float
    """Share in the mixture."""


@dataclass(frozen=True)
class DataIdentity:
    """The identity of a dataset and of the order in which its rows are drawn."""

    rows: int
    """Number of rows of an epoch."""
    seed: int
    shuffle: bool
    parts: Mapping[str, PartIdentity]
    """The parts of the mixture by name; one without a name where there is none."""

    @classmethod
    def of(cls, dataset: PromptDataset, data: DataConfig) -> "DataIdentity":
        parts = {
            name: PartIdentity(part.path, part.rows, part.num_bytes, digest_of(part, part.rows), part.weight)
            for name, part in dataset.parts().items()
        }
        return cls(len(dataset), data.seed, data.shuffle, parts)

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> "DataIdentity":
        """The identity of which `asdict` made this."""
        return cls(**{**value, "parts": {name: PartIdentity(**part) for name, part in value["parts"].items()}})

    def compared(self, dataset: PromptDataset, data: DataConfig) -> tuple[list[str], list[str]]:
        """Describe what of the data is another now, and what has only grown."""
        changed = [
            f"data.{key} was {json.dumps(before)} and is {json.dumps(now)}"
            for key, before, now in (("shuffle", self.shuffle, data.shuffle), ("seed", self.seed, data.seed))
            if before != now and (key == "shuffle" or data.shuffle)
        ]
        parts, grown = dataset.parts(), list[str]()
        if parts.keys() != self.parts.keys():
            before, now = (", ".join(filter(None, names)) or "none" for names in (self.parts, parts))
            return [*changed, f"data.mixture had the parts {before} and has {now}"], []
        for name, part in parts.items():
            saved, section = self.parts[name], f"data.mixture.{name}" if name else "data"
            if abs(saved.weight - part.weight) > 1e-9:
                changed.append(f"{section} had a share of {saved.weight:.3g} and has {part.weight:.3g}")
            if not _begins_with(part, saved):
                changed.append(
                    f"{section}.path was {saved.path} with {saved.rows:,} rows and is {part.path} with {part.rows:,} "
                    "others"
                )
            elif part.rows > saved.rows:
                grown.append(f"{section}.path={part.path} has grown from {saved.rows:,} to {part.rows:,} rows")
        return changed, grown


def _begins_with(part: DataPart, saved: PartIdentity) -> bool:
    """Return whether a part has the saved rows, and maybe more after them."""
    if part.rows < saved.rows or digest_of(part, saved.rows) != saved.digest:
        return False
    is_sampled = saved.rows > BLOCKS * BLOCK_ROWS and (part.path, part.rows) == (saved.path, saved.rows)
    return not is_sampled or 0 in (part.num_bytes, saved.num_bytes) or part.num_bytes == saved.num_bytes


def digest_of(part: DataPart, rows: int) -> str:
    """Digest of the first `rows` rows, by 64 blocks of them."""
    digest = hashlib.blake2b(digest_size=16)
    for index in _sampled(rows):
        digest.update(json.dumps(part.raw(index), sort_keys=True, default=_plain).encode())
    return digest.hexdigest()


def _sampled(rows: int) -> Iterator[int]:
    """Numbers of the rows that are looked at."""
    if rows <= BLOCKS * BLOCK_ROWS:
        yield from range(rows)
        return
    for block in range(BLOCKS):
        first = block * (rows - BLOCK_ROWS) // (BLOCKS - 1)
        yield from range(first, first + BLOCK_ROWS)


def _plain(value: Any) -> Any:
    """A value that JSON has none of, in a form that is the same in every process."""
    if isinstance(value, datetime.date | datetime.time | datetime.timedelta | decimal.Decimal):
        return str(value)
    data = value.tobytes() if hasattr(value, "tobytes") else value  # pictures and arrays
    return hashlib.sha256(data).hexdigest() if isinstance(data, bytes) else type(value).__name__


class HeldOutProblems:
    """Problems that evaluation measures, and on which no step may train.

    held_out = HeldOutProblems.of([evaluation])
    train.row(3) in held_out
    """

    def __init__(self, problems: Collection[bytes] = ()) -> None:
        self._problems = frozenset(problems)

    @classmethod
    def of(cls, datasets: Iterable[PromptDataset]) -> "HeldOutProblems":
        """Collect all rows of these datasets."""
        return cls([problem_of(dataset.row(index)) for dataset in datasets for index in range(len(dataset))])

    def __len__(self) -> int:
        return len(self._problems)

    def __contains__(self, row: DatasetRow) -> bool:
        return bool(self._problems) and problem_of(row) in self._problems

    def check(self, dataset: PromptDataset, num_read: int) -> int:
        """Count how many of the first rows to train on are held out. Raises `DataError` where it is most of them."""
        if not self._problems:
            return 0
        found = sum(dataset.row(index) in self for index in range(num_read))
        if found > MOST_LEFT_OUT * num_read:
            raise DataError(
                f"{found:,} of {num_read:,} rows to train on are problems of evaluation, on which no step trains: "
                f"{len(self):,} different ones are held out. Lower evaluation.num_problems, or name other held-out "
                "problems; where there are no others, as in a game that always begins alike, set "
                "evaluation.overlap=allow. An environment may say what tells its tasks apart: Task(…, problem=…)."
            )
        return found


def _asked(row: DatasetRow) -> list[dict[str, str]]:
    """The conversation after its system messages, or these where there is no more."""
    said = [dict(message) for message in row.messages] or [{"role": "user", "content": row.prompt}]
    return list(itertools.dropwhile(lambda message: message["role"] == "system", said)) or said


def problem_of(row: DatasetRow) -> bytes:
    """Digest that identifies a row's problem."""
    what = _asked(row) if row.problem is None else row.problem
    if row.pictures:
        what = [what, *(hashlib.sha256(picture).hexdigest() for picture in row.pictures)]
    return hashlib.blake2b(json.dumps(what, sort_keys=True, default=str).encode(), digest_size=16).digest()

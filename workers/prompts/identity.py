"""The identity of a run's data: whether a prompt cursor still means the rows and the order that it was drawn from.

    checkpoint ─ cursor, identity ─▶ the data of now ─▶ the same, or only grown: the cursor goes on
                                                     ─▶ other rows, another order: `data.on_change` says what then

Rows are known by 64 blocks of them, and files by their size besides: not by their place, which may be another.
"""

import datetime
import decimal
import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from penstock.conf.data import DataConfig
from penstock.workers.prompts.dataset_row import DataPart, PromptDataset

BLOCKS, BLOCK_ROWS = 64, 16


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

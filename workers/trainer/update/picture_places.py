"""Pictures of a micro-batch: what a vision tower computes features of, and where among the tokens these go. Pure.

    picture a ─┐  distinct ones, once          features ─┐ by place, and not by id: a placeholder that
    picture a ─┼▶ pixels, grids ─▶ tower ─▶ ────────────┼▶ a policy has written itself has none
    picture b ─┘                                         ▼
                               [start] [a] [a] [a] [a] [end] text …   embeddings

Tokens of text have one position on all three axes. A picture's have one position in time and those of its grid in
height and width, and the text goes on after the longer side (M-RoPE, Qwen2-VL, arXiv 2409.12191). Positions are found
for each sequence by its own pictures, before anything is padded or packed.

Legend: S sequences, L tokens of the longest, K distinct pictures, P patches of all of them, C numbers of a patch, U
features of E numbers, F placeholders of all sequences.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from penstock.algorithms.graph.columns import PROMPT_PICTURES
from penstock.conf.errors import DataError
from penstock.store.data.rows import Rows
from penstock.workers.trainer.update.sequences import SEEN, SEEN_RANGES, SPANS

PICTURES, RANGES = PROMPT_PICTURES


@dataclass(frozen=True)
class Picture:
    """A picture as a processor makes it."""

    key: str
    """Hash of its content: pictures of one key are computed once."""
    pixels_PC: np.ndarray
    """Patches, float32; of a family without grids `[1, channels, height, width]`."""
    grid: tuple[int, int, int]
    """Patches in time, height and width."""
    features_UE: Tensor | None = None
    """Features by a frozen tower, on the host; then no pixels are needed. None: they are computed where it is read."""


@dataclass(frozen=True)
class PlacedPicture:
    """A picture in a sequence."""

    picture: Picture
    offset: int
    """Place of its first placeholder."""


@dataclass(frozen=True)
class Pictures:
    """Tensors of a micro-batch's pictures; of one with none, a blank one that goes nowhere, so that ranks run the tower
    alike."""

    pixels_PC: Tensor
    """Patches of the distinct pictures, float32."""
    grids_K3: Tensor
    """Patches of each in time, height and width, int64."""
    places_F: Tensor
    """Place of each placeholder in the flattened `[S * L]`, ascending, int64."""
    sources_F: Tensor
    """Feature that goes there, of those of all distinct pictures, int64."""
    position_ids_3SL: Tensor
    """Positions in time, height and width, int64."""
    features_UE: Tensor | None = None
    """Features of all distinct pictures by a frozen tower; None: the model's tower runs."""

    def columns(self, first: int, count: int, length: int) -> "Pictures":
        """The pictures as a rank reads them that has `count` columns of `[S, length]`, from `first` on: features go to
        those alone. Positions stay those of all columns."""
        sequence_F, column_F = self.places_F // length, self.places_F % length - first
        is_own_F = (column_F >= 0) & (column_F < count)
        places_F = (sequence_F * count + column_F)[is_own_F]
        return replace(self, places_F=places_F, sources_F=self.sources_F[is_own_F])

    def to(self, device: torch.device) -> "Pictures":
        moved: dict[str, Any] = {
            name: None if value is None else value.to(device, non_blocking=True) for name, value in vars(self).items()
        }
        return Pictures(**moved)


class PictureReader(Protocol):
    """Reads the pictures of micro-batches: `models/vision.py`."""

    merge: int
    """Patches of a feature in height and in width."""
    blank: Picture
    """A picture that goes nowhere, in the place of none."""
    token_ids: tuple[int, ...]
    """Special tokens of vision, which no engine samples."""
    weight: Callable[[tuple[int, int, int]], int] | None
    """What the tower's pass over a picture of a grid is worth, in tokens of text; None: no tower runs in
    micro-batches."""

    def read(self, encoded: Any) -> Picture:
        """The picture of encoded bytes."""

    def prepare(self, rows: Rows) -> None:
        """Called before rows are cut into micro-batches, on all ranks alike."""


def pictures_of(
    rows: Rows,
    positions: np.ndarray,
    lengths_S: np.ndarray,
    starts_S: np.ndarray,
    shape: tuple[int, int],
    reader: PictureReader,
) -> Pictures:
    """The pictures of a micro-batch's rows, as `place` has them. Raises `DataError` for a picture of which the
    processor here makes another number of features than its tokens have placeholders."""
    placed: list[list[PlacedPicture]] = [[] for _ in lengths_S]
    for position, sequence, blob, offset, length in _read(rows, positions):
        picture = reader.read(blob)
        if num_tokens(picture.grid, reader.merge) != length:
            raise DataError(
                f"row {rows.row_ids[position]}: a picture has {length} placeholders in its prompt, and "
                f"{num_tokens(picture.grid, reader.merge)} features here. Prompts and trainer have processors that "
                "differ: give both the same model.path and the same packages."
            )
        placed[sequence].append(PlacedPicture(picture, offset))
    return place(placed, lengths_S, starts_S, shape, reader.merge, reader.blank)


def _read(rows: Rows, positions: np.ndarray) -> Iterator[tuple[int, int, Any, int, int]]:
    """Pictures that the rows at these positions read: position of the row, sequence among those of all of them, bytes,
    and start and number of placeholders in the sequence."""
    if SPANS in rows and SEEN in rows:
        encoded, ranges, spans = rows.blobs(SEEN), rows.arrays(SEEN_RANGES), rows.arrays(SPANS)
        first = 0
        for position in positions.tolist():
            table = ranges[position].reshape(-1, 3).tolist()
            for blob, (segment, offset, length) in zip(encoded[position], table, strict=True):
                if length:
                    yield position, first + segment, blob, offset, length
            first += int(spans[position][-3]) + 1
    elif PICTURES in rows and SPANS not in rows:
        encoded, ranges = rows.blobs(PICTURES), rows.arrays(RANGES)
        for sequence, position in enumerate(positions.tolist()):
            for blob, (offset, length) in zip(encoded[position], ranges[position].reshape(-1, 2).tolist(), strict=True):
                yield position, sequence, blob, offset, length


def place(
    placed: Sequence[Sequence[PlacedPicture]],
    lengths_S: np.ndarray,
    starts_S: np.ndarray,
    shape: tuple[int, int],
    merge: int,
    blank: Picture,
) -> Pictures:
    """Place the pictures of each sequence. `lengths_S`, `starts_S`: its tokens, and where it begins in the flattened
    `[S * L]`, of this `shape`. `merge`: patches of a feature in height and in width. Raises `DataError` for one that
    reaches beyond its sequence, or into another picture."""
    numbers: dict[str, int] = {}
    distinct, firsts, num_features = list[Picture](), list[int](), 0
    positions_3T = np.zeros((3, shape[0] * shape[1]), np.int64)
    places, sources = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    for of_sequence, length, start in zip(placed, lengths_S.tolist(), starts_S.tolist(), strict=True):
        positions_3T[:, start : start + length] = rope_positions(of_sequence, length, merge)
        for one in of_sequence:
            picture, count = one.picture, num_tokens(one.picture.grid, merge)
            if picture.key not in numbers:
                numbers[picture.key] = len(distinct)
                distinct.append(picture)
                firsts.append(num_features)
                num_features += count
            places.append(start + one.offset + np.arange(count))
            sources.append(firsts[numbers[picture.key]] + np.arange(count))
    distinct = distinct or [blank]
    known = [picture.features_UE for picture in distinct if picture.features_UE is not None]
    return Pictures(
        torch.from_numpy(np.concatenate([picture.pixels_PC for picture in distinct])),
        torch.tensor([picture.grid for picture in distinct]),
        torch.from_numpy(np.concatenate(places)),
        torch.from_numpy(np.concatenate(sources)),
        torch.from_numpy(positions_3T.reshape(3, *shape)),
        torch.cat(known) if len(known) == len(distinct) else None,
    )


def picture_weights(rows: Rows, positions: np.ndarray, reader: PictureReader) -> np.ndarray | None:
    """What the pictures of each row are worth, in tokens of text, int64, however many rows of a micro-batch share them;
    None: nothing, where no tower runs in micro-batches."""
    if reader.weight is None:
        return None
    weights = np.zeros(len(rows), np.int64)
    for position, _, encoded, _, _ in _read(rows, positions):
        weights[position] += reader.weight(reader.read(encoded).grid)
    return weights[positions]


def encoded_pictures(rows: Rows) -> Iterator[Any]:
    """Encoded pictures of rows, as often as they are read."""
    return (encoded for _, _, encoded, _, _ in _read(rows, np.arange(len(rows))))


def num_tokens(grid: tuple[int, int, int], merge: int) -> int:
    """Placeholders of a picture: one a feature.

    >>> num_tokens((1, 4, 6), merge=2)
    6
    """
    return grid[0] * (grid[1] // merge) * (grid[2] // merge)


def rope_positions(placed: Sequence[PlacedPicture], length: int, merge: int) -> np.ndarray:
    """Positions of a sequence's tokens in time, height and width, `[3, length]` int64. `placed`: in the order of their
    places. Raises `DataError`.

    >>> rope_positions([PlacedPicture(Picture("a", np.zeros((16, 3)), (1, 4, 4)), 1)], 6, merge=2)
    array([[0, 1, 1, 1, 1, 3],
           [0, 1, 1, 2, 2, 3],
           [0, 1, 2, 1, 2, 3]])
    """
    positions_3L = np.empty((3, length), np.int64)
    at = position = 0
    for one in placed:
        frames, height, width = one.picture.grid[0], one.picture.grid[1] // merge, one.picture.grid[2] // merge
        end = one.offset + frames * height * width
        if one.offset < at or end > length:
            raise DataError(
                f"a picture has tokens {one.offset} to {end} of a sequence of {length}, of which {at} are before it: "
                "pictures lie one after the other within their sequence. Is the prompt cut short?"
            )
        positions_3L[:, at : one.offset] = position + np.arange(one.offset - at)
        position += one.offset - at
        positions_3L[:, one.offset : end] = position + np.indices((frames, height, width)).reshape(3, -1)
        position += max(height, width)
        at = end
    positions_3L[:, at:] = position + np.arange(length - at)
    return positions_3L

"""The eyes of a trainer: the model's own processor (`workers/pictures/`), and the pictures that it has read last.
Several passes over the same rows, and rows of one group, read each picture once.

A tower that is frozen sees the same in a picture under every version. So what it sees is kept in the place of pixels,
and serves old and new policy, later epochs, and all rows that have the picture:

    look(rows) ─▶ pictures whose features are not known ─▶ the tower, one picture a pass ─▶ kept in host memory
    cut rows   ─▶ micro-batches with features, in which no tower runs
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from penstock.conf.trainer import REMEMBERED_BYTES
from penstock.store.data.rows import Rows
from penstock.workers.pictures.processor import PictureProcessor, hash_of
from penstock.workers.trainer.models.pictures import blank_picture
from penstock.workers.trainer.ranks import Ranks
from penstock.workers.trainer.update.pictures import Picture, Pictures, encoded_pictures, place


@dataclass(frozen=True)
class FrozenTower:
    """A tower that is not trained, on all ranks of a model."""

    see: Callable[[Pictures], Tensor]
    """Runs it: features `[U, E]`. Collective."""
    free: Callable[[], None]
    """Releases what was gathered for that."""
    ranks: Ranks


class Sight:
    """Implements `Eyes`. Lifecycle: made with a processor; `keep_features` if the tower is frozen; then `look` at each
    batch of rows, and `see` its pictures."""

    def __init__(self, processor: PictureProcessor, config: Any) -> None:
        """`config`: the model's."""
        self.merge, self.blank = processor.family.merge(config), blank_picture(config)
        self.token_ids = processor.token_ids
        self.weight: Callable[[tuple[int, int, int]], int] | None = None
        """See `Eyes`."""
        self._processor = processor
        self._seen: OrderedDict[str, Picture] = OrderedDict()
        """Pictures by the hash of their content, those that were asked for last at the end."""
        self._num_bytes = 0
        self._needed: set[str] = set()
        """Keys of the pictures of the rows that were looked at last, which stay whatever their bytes."""
        self._tower: FrozenTower | None = None
        self._smallest = self.blank

    def keep_features(self, tower: FrozenTower) -> None:
        """Keep what the tower sees from now on. Collective."""
        self._tower = tower
        width = self._features(self.blank).shape[1:]
        self.blank = replace(_without_pixels(self.blank), features_UE=torch.zeros(0, *width))

    def see(self, encoded: Any) -> Picture:
        """The picture of encoded bytes. Raises `DataError`."""
        content = bytes(encoded)
        return self._of(hash_of(content), content)

    def look(self, rows: Rows) -> None:
        """Have the tower, if it is frozen, see the pictures that it has not seen, each alone: so that what it sees in
        one depends on no other, nor on what was seen before. Collective: ranks that have fewer of them run it as often.
        Raises `DataError`."""
        if self._tower is None:
            return
        contents = {hash_of(content): content for content in map(bytes, encoded_pictures(rows))}
        self._needed = set(contents)
        unseen = [key for key in contents if key not in self._seen or self._seen[key].features_UE is None]
        num_passes = max(self._tower.ranks.gather(len(unseen)))
        for number in range(num_passes):
            if number >= len(unseen):
                self._features(self._smallest)
                continue
            picture = self._of(unseen[number], contents[unseen[number]])
            self._forget(picture.key)
            self._add(replace(_without_pixels(picture), features_UE=self._features(picture)))
        if num_passes:
            self._tower.free()

    @torch.no_grad()
    def _features(self, picture: Picture) -> Tensor:
        assert self._tower is not None
        nothing = np.zeros(0, np.int64)
        seen = place([], nothing, nothing, (1, 1), self.merge, picture)
        return self._tower.see(seen.to(self._tower.ranks.device)).cpu()

    def _of(self, key: str, content: bytes) -> Picture:
        if key not in self._seen:
            self._add(self._read(key, content))
        self._seen.move_to_end(key)
        return self._seen[key]

    def _read(self, key: str, content: bytes) -> Picture:
        features = self._processor.features([content])
        frames, height, width = features.grid_thw[0].tolist()
        return Picture(key, features.pixel_values, (frames, height, width))

    def _add(self, picture: Picture) -> None:
        self._seen[picture.key] = picture
        self._num_bytes += _num_bytes(picture)
        for oldest in [key for key in self._seen if key not in self._needed and key != picture.key]:
            if self._num_bytes <= REMEMBERED_BYTES:
                break
            self._forget(oldest)

    def _forget(self, key: str) -> None:
        self._num_bytes -= _num_bytes(self._seen.pop(key))


def _num_bytes(picture: Picture) -> int:
    return picture.pixels_PC.nbytes + (0 if picture.features_UE is None else picture.features_UE.nbytes)


def _without_pixels(picture: Picture) -> Picture:
    return replace(picture, pixels_PC=np.zeros((0, *picture.pixels_PC.shape[1:]), np.float32))

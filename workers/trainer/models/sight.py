"""The processor of a trainer: the model's own (`workers/pictures/`), and the pictures that it has read last. Several
passes over the same rows, and rows of one group, read each picture once."""

from collections import OrderedDict
from typing import Any

from penstock.workers.pictures.processor import PictureProcessor, hash_of
from penstock.workers.trainer.models.pictures import blank_picture
from penstock.workers.trainer.update.pictures import Picture

REMEMBERED_BYTES = 2**30
"""Most bytes of pixels that are kept: some fifty large pictures, or thousands of small ones."""


class Sight:
    """Implements `Eyes`."""

    def __init__(self, processor: PictureProcessor, config: Any) -> None:
        """`config`: the model's."""
        self.merge, self.blank = processor.family.merge(config), blank_picture(config)
        self.token_ids = processor.token_ids
        self._processor = processor
        self._seen: OrderedDict[str, Picture] = OrderedDict()
        """Pictures by the hash of their content, those that were asked for last at the end."""
        self._num_bytes = 0

    def see(self, encoded: Any) -> Picture:
        """The picture of encoded bytes. Raises `DataError`."""
        content = bytes(encoded)
        key = hash_of(content)
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
        self._num_bytes += picture.pixels_PC.nbytes
        while self._num_bytes > REMEMBERED_BYTES and len(self._seen) > 1:
            _, oldest = self._seen.popitem(last=False)
            self._num_bytes -= oldest.pixels_PC.nbytes

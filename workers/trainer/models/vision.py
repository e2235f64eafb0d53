"""How a model with a vision tower reads pictures: the tower's features among the embeddings of text.

Features go to the places that `update/picture_places.py` names, whatever ids are there; those of some families
(`workers/pictures/processor.py`) to the hidden states of the first layers, too. A rank without a picture runs the tower
too, on a blank one: where parameters are sharded, its peers wait for it in every layer.

A trainer reads pictures by the model's own processor (`workers/pictures/`) and remembers those that it has read last:
several passes over the same rows, and rows of one group, read each picture once. The features of a frozen tower are the
same under every version. So they are kept in the place of pixels, and serve old and new policy, later epochs, and all
rows that have the picture:

    prepare(rows) ─▶ pictures whose features are not known ─▶ the tower, one picture a pass ─▶ kept in host memory
    cut rows      ─▶ micro-batches with features, in which no tower runs
"""

import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from penstock.conf.errors import ConfigError
from penstock.conf.trainer import REMEMBERED_BYTES
from penstock.store.data.rows import Rows
from penstock.workers.pictures.processor import FAMILIES, Family, PictureProcessor, hash_of, refusal
from penstock.workers.trainer.models import packed_attention
from penstock.workers.trainer.ranks import Ranks
from penstock.workers.trainer.update.picture_places import Picture, Pictures, encoded_pictures, place


def family_of(lm: Any) -> Family | None:
    """The family of a vision model; None: it reads text only."""
    return FAMILIES.get(lm.config.model_type)


def vision_tower(lm: Any) -> list[nn.Module]:
    """The modules of a model's vision tower; none: it reads text only."""
    family = family_of(lm)
    return [] if family is None else [getattr(lm.base_model, name) for name in family.tower]


def features(lm: Any, pictures: Pictures) -> Tensor:
    """The tower's features of all distinct pictures, computed or known, `[U, E]`: side by side those that go among the
    embeddings, and for some families those that are added to the hidden states after each of the first layers."""
    if pictures.features_UE is not None:
        return pictures.features_UE
    family: Any = family_of(lm)
    seen = lm.base_model.get_image_features(**family.inputs(pictures.pixels_PC, pictures.grids_K3))
    parts = (seen.pooler_output, *(getattr(seen, "deepstack_features", None) or ()))
    return torch.cat([torch.cat(list(part)) for part in parts], -1)


def keywords(lm: Any, input_ids_SL: Tensor, pictures: Pictures | None) -> dict[str, Any]:
    """Keyword arguments that call the part of a model that reads text, with ids, or with embeddings and the positions
    that their pictures give them."""
    family = family_of(lm)
    if pictures is None or family is None:
        return {"input_ids": input_ids_SL}
    embedded_SLH: Tensor = lm.get_input_embeddings()(input_ids_SL)
    features_UE = features(lm, pictures).to(embedded_SLH.dtype)
    position_ids = pictures.position_ids_3SL if family.has_grids else pictures.position_ids_3SL[-1]
    if not len(pictures.places_F):
        embedded_SLH = embedded_SLH + 0 * features_UE.sum() if features_UE.requires_grad else embedded_SLH
        return {"inputs_embeds": embedded_SLH, "position_ids": position_ids}
    features_FE = features_UE.index_select(0, pictures.sources_F)
    features_FH, *deeper = features_FE.split(embedded_SLH.shape[-1], -1)
    embedded_NH = embedded_SLH.flatten(0, 1).index_copy(0, pictures.places_F, features_FH)
    read = {"inputs_embeds": embedded_NH.view_as(embedded_SLH), "position_ids": position_ids}
    if not deeper:
        return read
    is_seen_N = torch.zeros(len(embedded_NH), dtype=torch.bool, device=embedded_NH.device)
    is_seen_SL = is_seen_N.index_fill(0, pictures.places_F, True).view(input_ids_SL.shape)
    return read | {"visual_pos_masks": is_seen_SL, "deepstack_visual_embeds": deeper}


def check_vision(lm: Any) -> None:
    """Raise `ConfigError` for a vision model of a family that is not known here."""
    kind, family = lm.config.model_type, family_of(lm)
    if family is not None:
        family.check(lm.config)
    elif hasattr(lm.base_model, "visual"):
        raise ConfigError(f"model.path: {kind!r} is {refusal(kind)}. Choose one of them.")


def has_frozen_tower(lm: Any) -> bool:
    """Return whether a model has a vision tower, none of which is trained."""
    parameters = [parameter for module in vision_tower(lm) for parameter in module.parameters()]
    return bool(parameters) and not any(parameter.requires_grad for parameter in parameters)


def tower_cost(lm: Any) -> Callable[[tuple[int, int, int]], int]:
    """A function that weighs the tower's pass over a picture of a grid, in tokens of text: by floating-point
    operations, 2 for each parameter of the tower and patch, and 4 for each of its width, patch, and patch attended to.
    Call it before the model is sharded."""
    vision = lm.config.vision_config
    depth = getattr(vision, "depth", None) or vision.num_hidden_layers
    width = getattr(vision, "embed_dim", None) or vision.hidden_size
    num_whole = len(getattr(vision, "fullatt_block_indexes", None) or range(depth))
    window = (getattr(vision, "window_size", None) or 2**20) // vision.patch_size
    of_tower = sum(parameter.numel() for module in vision_tower(lm) for parameter in module.parameters())
    of_token = sum(parameter.numel() for parameter in packed_attention.text_model(lm).layers.parameters())

    def weight(grid: tuple[int, int, int]) -> int:
        num_patches = math.prod(grid)
        attended = num_whole * num_patches + (depth - num_whole) * min(num_patches, window**2)
        return math.ceil(num_patches * (of_tower + 2 * width * attended) / of_token)

    return weight


def freeze_tower(lm: Any) -> int:
    """Let no gradient change the vision tower. Returns the number of its parameters."""
    parameters = [parameter for module in vision_tower(lm) for parameter in module.parameters()]
    for parameter in parameters:
        parameter.requires_grad_(False)
    return sum(parameter.numel() for parameter in parameters)


def no_pictures(lm: Any, lengths: Sequence[int], shape: Sequence[int], device: torch.device) -> Pictures | None:
    """The pictures of sequences without any, of so many tokens each and one after the other; None: the model reads text
    only."""
    family = family_of(lm)
    if family is None:
        return None
    starts, merge = np.cumsum(lengths) - np.asarray(lengths), family.merge(lm.config)
    size = (int(shape[0]), int(shape[1]))
    return place([[] for _ in lengths], np.asarray(lengths), starts, size, merge, blank_picture(lm.config)).to(device)


def blank_picture(config: Any) -> Picture:
    """The smallest picture that a tower takes, all zero."""
    return Picture("", *FAMILIES[config.model_type].blank(config))


@dataclass(frozen=True)
class FrozenTower:
    """A tower that is not trained, on all ranks of a model."""

    compute: Callable[[Pictures], Tensor]
    """Returns features `[U, E]`. Collective."""
    free: Callable[[], None]
    """Releases what was gathered for that."""
    ranks: Ranks


class PictureCache:
    """A processor, and the pictures that it has read last: a `PictureReader`. Lifecycle: made with a processor;
    `cache_features` if the tower is frozen; then `prepare` for each batch of rows, and `read` its pictures."""

    def __init__(self, processor: PictureProcessor, config: Any) -> None:
        """`config`: the model's."""
        self.merge, self.blank = processor.family.merge(config), blank_picture(config)
        self.token_ids = processor.token_ids
        self.weight: Callable[[tuple[int, int, int]], int] | None = None
        """See `PictureReader`."""
        self._processor = processor
        self._pictures: OrderedDict[str, Picture] = OrderedDict()
        """Pictures by the hash of their content, those that were read last at the end."""
        self._num_bytes = 0
        self._needed: set[str] = set()
        """Keys of the pictures of the present rows, which stay whatever their bytes."""
        self._tower: FrozenTower | None = None
        self._smallest = self.blank

    def cache_features(self, tower: FrozenTower) -> None:
        """Keep the tower's features from now on. Collective."""
        self._tower = tower
        width = self._features(self.blank).shape[1:]
        self.blank = replace(_without_pixels(self.blank), features_UE=torch.zeros(0, *width))

    def read(self, encoded: Any) -> Picture:
        """The picture of encoded bytes. Raises `DataError`."""
        content = bytes(encoded)
        return self._of(hash_of(content), content)

    def prepare(self, rows: Rows) -> None:
        """Have the tower, if it is frozen, compute the features that are not known, of each picture alone: so that they
        depend on no other picture, nor on what was computed before. Collective: ranks that have fewer of them run it as
        often. Raises `DataError`."""
        if self._tower is None:
            return
        contents = {hash_of(content): content for content in map(bytes, encoded_pictures(rows))}
        self._needed = set(contents)
        unknown = [key for key in contents if key not in self._pictures or self._pictures[key].features_UE is None]
        num_passes = max(self._tower.ranks.gather(len(unknown)))
        for number in range(num_passes):
            if number >= len(unknown):
                self._features(self._smallest)
                continue
            picture = self._of(unknown[number], contents[unknown[number]])
            self._forget(picture.key)
            self._add(replace(_without_pixels(picture), features_UE=self._features(picture)))
        if num_passes:
            self._tower.free()

    @torch.no_grad()
    def _features(self, picture: Picture) -> Tensor:
        assert self._tower is not None
        nothing = np.zeros(0, np.int64)
        seen = place([], nothing, nothing, (1, 1), self.merge, picture)
        return self._tower.compute(seen.to(self._tower.ranks.device)).cpu()

    def _of(self, key: str, content: bytes) -> Picture:
        if key not in self._pictures:
            features = self._processor.features([content])
            frames, height, width = features.grid_thw[0].tolist()
            self._add(Picture(key, features.pixel_values, (frames, height, width)))
        self._pictures.move_to_end(key)
        return self._pictures[key]

    def _add(self, picture: Picture) -> None:
        self._pictures[picture.key] = picture
        self._num_bytes += _num_bytes(picture)
        for oldest in [key for key in self._pictures if key not in self._needed and key != picture.key]:
            if self._num_bytes <= REMEMBERED_BYTES:
                break
            self._forget(oldest)

    def _forget(self, key: str) -> None:
        self._num_bytes -= _num_bytes(self._pictures.pop(key))


def _num_bytes(picture: Picture) -> int:
    return picture.pixels_PC.nbytes + (0 if picture.features_UE is None else picture.features_UE.nbytes)


def _without_pixels(picture: Picture) -> Picture:
    return replace(picture, pixels_PC=np.zeros((0, *picture.pixels_PC.shape[1:]), np.float32))

"""The eyes of a model: the features that its vision tower makes of pictures, among the embeddings of text.

Features go to the places that `update/pictures.py` names, whatever ids are there. A rank without a picture runs the
tower too, on a blank one: where parameters are sharded, its peers wait for it in every layer.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from penstock.conf.errors import ConfigError
from penstock.conf.trainer import TrainerConfig
from penstock.workers.pictures.processor import FAMILIES
from penstock.workers.trainer.update.pictures import Picture, Pictures, place


def tower_of(lm: Any) -> nn.Module | None:
    """The part of a model that sees; None: it reads text only."""
    return getattr(lm.base_model, "visual", None)


def embeddings(lm: Any, input_ids_SL: Tensor, pictures: Pictures) -> Tensor:
    """Embeddings of tokens, and of pictures at their places: `[S, L, H]`."""
    tower: Any = tower_of(lm)
    embedded_SLH: Tensor = lm.get_input_embeddings()(input_ids_SL)
    seen = tower(pictures.pixels_PC.to(tower.dtype), grid_thw=pictures.grids_K3)
    features_UH = seen.pooler_output.to(embedded_SLH.dtype)
    if not len(pictures.places_F):
        return embedded_SLH + 0 * features_UH.sum() if features_UH.requires_grad else embedded_SLH
    features_FH = features_UH.index_select(0, pictures.sources_F)
    return embedded_SLH.flatten(0, 1).index_copy(0, pictures.places_F, features_FH).view_as(embedded_SLH)


def keywords(lm: Any, input_ids_SL: Tensor, pictures: Pictures | None) -> dict[str, Any]:
    """Keyword arguments that call the base model with what is read: ids, or embeddings with the positions that their
    pictures give them."""
    if pictures is None:
        return {"input_ids": input_ids_SL}
    return {"inputs_embeds": embeddings(lm, input_ids_SL, pictures), "position_ids": pictures.position_ids_3SL}


def check_sees(lm: Any, config: TrainerConfig) -> None:
    """Raise `ConfigError` for a model that sees in a way, or is split in one, that is not known here."""
    kind = lm.config.model_type
    if tower_of(lm) is None:
        return
    if kind not in FAMILIES:
        raise ConfigError(
            f"model.path: {kind!r} sees, and pictures are known of {', '.join(FAMILIES)}. Choose another."
        )
    split = {
        "trainer.engine": config.engine != "fsdp",
        "trainer.tensor_parallel_size": config.tensor_parallel_size > 1,
        "trainer.sequence_parallel_size": config.sequence_parallel_size > 1,
    }
    if keys := [key for key, is_split in split.items() if is_split]:
        raise ConfigError(f"{keys[0]}: a model that sees ({kind}) is not split so yet. Leave it as it is by default.")


def freeze_tower(lm: Any) -> int:
    """Let no gradient change the part of a model that sees. Returns the number of its parameters."""
    tower = tower_of(lm)
    parameters = [] if tower is None else list(tower.parameters())
    for parameter in parameters:
        parameter.requires_grad_(False)
    return sum(parameter.numel() for parameter in parameters)


def auto_class(config: Any) -> Any:
    """The class of transformers that makes a model of a configuration: for text, or for text and pictures."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    return AutoModelForImageTextToText if config.model_type in FAMILIES else AutoModelForCausalLM


def nothing_to_see(lm: Any, lengths: Sequence[int], shape: Sequence[int], device: torch.device) -> Pictures | None:
    """What a model sees whose sequences, of so many tokens each and one after the other, have no pictures; None: it
    reads text only."""
    if tower_of(lm) is None:
        return None
    starts, merge = np.cumsum(lengths) - np.asarray(lengths), lm.config.vision_config.spatial_merge_size
    size = (int(shape[0]), int(shape[1]))
    return place([[] for _ in lengths], np.asarray(lengths), starts, size, merge, blank_picture(lm.config)).to(device)


def blank_picture(config: Any) -> Picture:
    """The smallest picture that a tower takes, all zero."""
    vision = config.vision_config
    width, merge = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2, vision.spatial_merge_size
    return Picture("", np.zeros((merge * merge, width), np.float32), (1, merge, merge))

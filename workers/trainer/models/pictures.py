"""The eyes of a model: the features that its vision tower makes of pictures, among the embeddings of text.

Features go to the places that `update/pictures.py` names, whatever ids are there. A rank without a picture runs the
tower too, on a blank one: where parameters are sharded, its peers wait for it in every layer.
"""

from typing import Any

import numpy as np
from torch import Tensor, nn

from penstock.workers.trainer.update.pictures import Picture, Pictures

FAMILIES = ("qwen2_vl", "qwen2_5_vl")
"""Kinds of models whose pictures are known here: one feature a placeholder, positions on three axes."""


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


def blank_picture(config: Any) -> Picture:
    """The smallest picture that a tower takes, all zero."""
    vision = config.vision_config
    width, merge = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2, vision.spatial_merge_size
    return Picture("", np.zeros((merge * merge, width), np.float32), (1, merge, merge))

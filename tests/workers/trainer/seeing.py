"""A tiny model that sees, rows with pictures, and a processor that makes them up: for tests of the trainer."""

from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from penstock.store.data.rows import Rows
from penstock.workers.pictures.processor import FAMILIES, Features
from penstock.workers.trainer.models.vision import PictureCache
from penstock.workers.trainer.update.picture_places import Picture, num_tokens

PAD, PATCH, SIDE = 5, 3 * 2 * 14 * 14, 56
TEXT: dict[str, Any] = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 32, "max_position_embeddings": 512, "tie_word_embeddings": True,
}  # fmt: skip
ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [6, 5, 5]}
SIZES = {"num_heads": 2, "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2}
IDS = {"image_token_id": PAD, "video_token_id": 6, "vision_start_token_id": 3, "vision_end_token_id": 4}
TOWER = {"hidden_size": 32, "intermediate_size": 64}
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen2_vl": IDS | {
        "text_config": TEXT | {"rope_parameters": ROPE},
        "vision_config": SIZES | {"depth": 2, "embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2},
    },
    "qwen2_5_vl": IDS | {
        "text_config": TEXT | {"rope_parameters": ROPE},
        "vision_config": SIZES | TOWER | {
            "depth": 2, "out_hidden_size": 64, "window_size": 56, "fullatt_block_indexes": [1]
        },
    },
    "qwen3_vl": IDS | {
        "text_config": TEXT | {"num_hidden_layers": 3, "rope_parameters": ROPE | {"mrope_interleaved": True}},
        "vision_config": SIZES | TOWER | {
            "depth": 3, "out_hidden_size": 64, "num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1]
        },
    },
    "llava": {
        "image_token_index": PAD, "text_config": TEXT | {"model_type": "llama"},
        "vision_config": TOWER | {
            "model_type": "clip_vision_model", "num_hidden_layers": 3, "num_attention_heads": 2, "patch_size": 14,
            "image_size": SIDE, "projection_dim": 32,
        },
    },
}  # fmt: skip


def model_that_sees(kind: str, text: Mapping[str, Any] = MappingProxyType({})) -> Any:
    """A model of this kind, whose weights are large enough for pictures to matter. `text`: other sizes of what reads
    text."""
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText

    sizes = deepcopy(CONFIGS[kind])
    sizes["text_config"] |= text
    config = AutoConfig.for_model(kind, tie_word_embeddings=True, **sizes)
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config, attn_implementation="sdpa").float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(3.0)
    return model


def merge_of(kind: str) -> int:
    return 2 if FAMILIES[kind].has_grids else 1


def picture(key: str, height: int, width: int, kind: str = "qwen2_5_vl") -> Picture:
    """A picture of so many patches, or for a family without grids of one size, of noise."""
    random = np.random.RandomState(ord(key))
    if not FAMILIES[kind].has_grids:
        return Picture(key, random.randn(1, 3, SIDE, SIDE).astype(np.float32), (1, 1, (SIDE // 14) ** 2))
    return Picture(key, random.randn(height * width, PATCH).astype(np.float32), (1, height, width))


class MadeUpProcessor:
    """A processor of pictures that are written as `a 4 6`: a key, height and width in patches."""

    def __init__(self, config: Any) -> None:
        self.kind, self.family = config.model_type, FAMILIES[config.model_type]
        self.token_ids = tuple(getattr(config, name) for name in self.family.tokens)

    def features(self, encoded: list[bytes]) -> Features:
        ((key, height, width),) = (one.decode().split() for one in encoded)
        made = picture(key, int(height), int(width), self.kind)
        return Features(made.pixels_PC, np.array([made.grid]))


class MadeUp(PictureCache):
    """The eyes of a trainer, with that processor."""

    def __init__(self, config: Any) -> None:
        processor: Any = MadeUpProcessor(config)
        super().__init__(processor, config)


def rows_with(prompts: list[list[str]], seed: int = 0, kind: str = "qwen2_5_vl") -> Rows:
    """Rows whose prompts have these pictures, each after some text."""
    random = np.random.RandomState(seed)
    columns: dict[str, list[Any]] = {name: [] for name in ("prompt_ids", "pictures", "picture_ranges", "response_ids")}
    for pictures in prompts:
        ids, ranges = random.randint(7, 128, 3).tolist(), list[int]()
        for one in pictures:
            key, height, width = one.split()
            length = num_tokens(picture(key, int(height), int(width), kind).grid, merge_of(kind))
            ranges += [len(ids), length]
            ids += [PAD] * length + random.randint(7, 128, 2).tolist()
        columns["prompt_ids"].append(ids)
        columns["pictures"].append([one.encode() for one in pictures])
        columns["picture_ranges"].append(ranges)
        columns["response_ids"].append(random.randint(7, 128, random.randint(2, 9)).tolist())
    columns["behavior_logprobs"] = [[-4.5] * len(ids) for ids in columns["response_ids"]]
    columns["advantage"] = random.randn(len(prompts)).tolist()
    return Rows.from_lists(columns)


def save_model(kind: str, directory: Path, text: Mapping[str, Any] = MappingProxyType({})) -> str:
    model_that_sees(kind, text).save_pretrained(directory)
    return str(directory)

"""A tiny model that sees, rows with pictures, and a processor that makes them up: for tests of the trainer."""

from pathlib import Path
from typing import Any

import numpy as np

from penstock.store.data.rows import Rows
from penstock.workers.trainer.models.pictures import blank_picture
from penstock.workers.trainer.update.pictures import Picture, num_tokens

PAD, MERGE, PATCH = 5, 2, 3 * 2 * 14 * 14
TEXT = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 512, "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "default", "mrope_section": [4, 6, 6], "rope_theta": 10000.0},
}  # fmt: skip
SIZES = {"depth": 2, "num_heads": 2, "patch_size": 14, "spatial_merge_size": MERGE, "temporal_patch_size": 2}
VISION = {
    "qwen2_5_vl": SIZES | {"hidden_size": 32, "intermediate_size": 64, "out_hidden_size": 64, "window_size": 56,
                           "fullatt_block_indexes": [1]},
    "qwen2_vl": SIZES | {"embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2},
}  # fmt: skip
IDS = {"image_token_id": PAD, "video_token_id": 6, "vision_start_token_id": 3, "vision_end_token_id": 4}


def model_that_sees(kind: str) -> Any:
    """A model of this kind, whose weights are large enough for pictures to matter."""
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText

    config = AutoConfig.for_model(kind, text_config=TEXT, vision_config=VISION[kind], tie_word_embeddings=True, **IDS)
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config, attn_implementation="sdpa").float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(3.0)
    return model


def picture(key: str, height: int, width: int) -> Picture:
    """A picture of so many patches, of noise."""
    random = np.random.RandomState(ord(key))
    return Picture(key, random.randn(height * width, PATCH).astype(np.float32), (1, height, width))


class MadeUp:
    """A processor of pictures that are written as `a 4 6`: a key, height and width in patches."""

    merge = MERGE
    token_ids = (PAD, 6, 3, 4)

    def __init__(self, config: Any) -> None:
        self.blank = blank_picture(config)

    def see(self, encoded: Any) -> Picture:
        key, height, width = bytes(encoded).decode().split()
        return picture(key, int(height), int(width))


def rows_with(prompts: list[list[str]], seed: int = 0) -> Rows:
    """Rows whose prompts have these pictures, each after some text."""
    random = np.random.RandomState(seed)
    columns: dict[str, list[Any]] = {name: [] for name in ("prompt_ids", "pictures", "picture_ranges", "response_ids")}
    for pictures in prompts:
        ids, ranges = random.randint(7, 128, 3).tolist(), list[int]()
        for one in pictures:
            _, height, width = one.split()
            length = num_tokens((1, int(height), int(width)), MERGE)
            ranges += [len(ids), length]
            ids += [PAD] * length + random.randint(7, 128, 2).tolist()
        columns["prompt_ids"].append(ids)
        columns["pictures"].append([one.encode() for one in pictures])
        columns["picture_ranges"].append(ranges)
        columns["response_ids"].append(random.randint(7, 128, random.randint(2, 9)).tolist())
    columns["behavior_logprobs"] = [[-4.5] * len(ids) for ids in columns["response_ids"]]
    columns["advantage"] = random.randn(len(prompts)).tolist()
    return Rows.from_lists(columns)


def save_model(kind: str, directory: Path) -> str:
    model_that_sees(kind).save_pretrained(directory)
    return str(directory)

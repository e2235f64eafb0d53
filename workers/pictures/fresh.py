"""The eyes of a fresh model (`workers/fresh_model.py`): a Qwen2.5-VL's vision tower, its image processor, its special
tokens and how its chat template writes them.

A feature stands for 28 x 28 pixels. A picture is resized to 1 to 16 features and keeps the shape that it has.
"""

from pathlib import Path
from typing import Any

from penstock.conf.model import FreshModelConfig
from penstock.workers.pictures.families import FAMILIES
from penstock.workers.pictures.processor import PictureProcessor

FAMILY = "qwen2_5_vl"
START, END, IMAGE, VIDEO = "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"
WORDS = (START, END, IMAGE, VIDEO)
"""Special tokens of vision, the last ones of the vocabulary."""
CONTENT = (
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    f"{{% if part['type'] == 'image' %}}{START}{IMAGE}{END}{{% else %}}{{{{ part['text'] }}}}{{% endif %}}"
    "{% endfor %}{% endif %}"
)
"""The part of the chat template that writes the content of a message."""
PATCH, MERGED, FRAMES = 14, 2, 2
"""Pixels of a patch's side, patches of a feature's side, and frames of a patch, in which a picture is repeated."""
SIZES = {
    "size": {"shortest_edge": (PATCH * MERGED) ** 2, "longest_edge": 16 * (PATCH * MERGED) ** 2},
    "patch_size": PATCH, "merge_size": MERGED, "temporal_patch_size": FRAMES,
}  # fmt: skip
HEAD = 32
"""Numbers of a head of the tower."""


def vision_config(config: FreshModelConfig, first_id: int) -> dict[str, Any]:
    """What the configuration of a model that sees has besides its text's. `first_id`: token of the first of `WORDS`."""
    width = config.vision_hidden_size
    tower = {
        "depth": config.num_vision_layers,
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "num_heads": width // HEAD,
        "out_hidden_size": config.hidden_size,
        "patch_size": PATCH,
        "spatial_merge_size": MERGED,
        "temporal_patch_size": FRAMES,
        "window_size": 4 * PATCH * MERGED,
        "fullatt_block_indexes": list(range(config.num_vision_layers)),
        "initializer_range": config.initializer_range,
    }
    start, end, image, video = range(first_id, first_id + len(WORDS))
    return {
        "vision_config": tower,
        "image_token_id": image,
        "video_token_id": video,
        "vision_start_token_id": start,
        "vision_end_token_id": end,
    }


def processor(first_id: int) -> PictureProcessor:
    """The processor of a fresh model that sees, which need not have been made."""
    from transformers import Qwen2VLImageProcessorPil

    start, end, image, video = range(first_id, first_id + len(WORDS))
    return PictureProcessor(FAMILIES[FAMILY], [image, video, start, end], Qwen2VLImageProcessorPil(**SIZES))


def save_processor(directory: Path, tokenizer: Any) -> None:
    """Write the processor of a fresh model as vLLM and transformers load it, its tokenizer with it."""
    from transformers import Qwen2_5_VLProcessor, Qwen2VLImageProcessor, Qwen2VLVideoProcessor

    images, videos = Qwen2VLImageProcessor(**SIZES), Qwen2VLVideoProcessor(**SIZES)
    Qwen2_5_VLProcessor(images, tokenizer, videos, chat_template=tokenizer.chat_template).save_pretrained(directory)

"""A Qwen2.5-VL of 0.2M parameters with its processor, from its configuration alone, and pictures to show it."""

import io
from pathlib import Path

import numpy as np

from penstock.conf.model import FreshModelConfig
from penstock.workers.fresh_model import BOS_ID, CHAT_TEMPLATE, CONTENT, EOS_ID, PAD_ID, character_tokenizer
from penstock.workers.pictures import fresh

START, END, IMAGE, VIDEO = "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"
PIXELS = {"shortest_edge": 28 * 28, "longest_edge": 28 * 28 * 16}
"""Fewest and most pixels of a picture after it is resized: from 1 to 16 features of 28 x 28 each."""


def build_vision_model(directory: Path, seed: int = 0, **vision: int) -> Path:
    """Write model, tokenizer and processor. vLLM's CPU build has no attention for heads smaller than 32."""
    import torch
    from transformers import (
        Qwen2_5_VLConfig,
        Qwen2_5_VLForConditionalGeneration,
        Qwen2_5_VLProcessor,
        Qwen2VLImageProcessor,
        Qwen2VLVideoProcessor,
    )

    tokenizer = character_tokenizer(FreshModelConfig(words=[START, END, IMAGE, VIDEO], max_position_embeddings=512))
    tokenizer.chat_template = CHAT_TEMPLATE.replace(CONTENT, fresh.CONTENT)
    ids = tokenizer.get_vocab()
    config = Qwen2_5_VLConfig(
        text_config={
            "vocab_size": len(tokenizer), "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
            "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 512,
            "rope_parameters": {"rope_type": "default", "mrope_section": [4, 6, 6], "rope_theta": 10000.0},
            "bos_token_id": BOS_ID, "eos_token_id": EOS_ID, "pad_token_id": PAD_ID, "initializer_range": 0.2,
            "tie_word_embeddings": True,
        },
        vision_config={
            "depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 64,
            "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2, "window_size": 56,
            "fullatt_block_indexes": [1], "initializer_range": 0.2, **vision,
        },
        image_token_id=ids[IMAGE], video_token_id=ids[VIDEO], vision_start_token_id=ids[START],
        vision_end_token_id=ids[END], tie_word_embeddings=True,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen2_5_VLForConditionalGeneration(config).float()
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = EOS_ID, PAD_ID
    model.save_pretrained(directory)
    sizes = {"size": PIXELS, "patch_size": 14, "merge_size": 2, "temporal_patch_size": 2}
    images, videos = Qwen2VLImageProcessor(**sizes), Qwen2VLVideoProcessor(**sizes)
    Qwen2_5_VLProcessor(images, tokenizer, videos, chat_template=tokenizer.chat_template).save_pretrained(directory)
    return directory


def picture(height: int, width: int, seed: int = 0, kind: str = "PNG") -> bytes:
    """Encode a picture of noise."""
    from PIL import Image

    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    target = io.BytesIO()
    Image.fromarray(pixels).save(target, kind)
    return target.getvalue()

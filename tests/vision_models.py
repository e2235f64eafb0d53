"""Models that see, of 0.2M parameters each with its processor, from their configurations alone, and pictures to show
them."""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np

from penstock.conf.model import FreshModelConfig
from penstock.workers import fresh_model
from penstock.workers.fresh_model import BOS_ID, CHAT_TEMPLATE, CONTENT, EOS_ID, PAD_ID, character_tokenizer

START, END, IMAGE, VIDEO = "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"
PIXELS = {"shortest_edge": 28 * 28, "longest_edge": 28 * 28 * 16}
"""Fewest and most pixels of a picture after it is resized: from 1 to 16 features of 28 x 28 each."""
SIDE = 56
"""Pixels of each side of what a LLaVA sees: 16 features."""
DRAWN = 0.2
"""Standard deviation of weights: with small ones, a model hardly sees its pictures."""
TEXT: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 32,
    "num_key_value_heads": 1, "max_position_embeddings": 512, "bos_token_id": BOS_ID, "eos_token_id": EOS_ID,
    "pad_token_id": PAD_ID, "tie_word_embeddings": True,
}  # fmt: skip
"""vLLM's CPU build has no attention for heads smaller than 32."""
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
SECTIONS: dict[str, dict[str, Any]] = {
    "qwen2_vl": {"mrope_section": [4, 6, 6]},
    "qwen2_5_vl": {"mrope_section": [4, 6, 6]},
    "qwen3_vl": {"mrope_section": [6, 5, 5], "mrope_interleaved": True},
}
"""Numbers of a head that turn by time, height and width."""
PATCHES = {"patch_size": 14, "temporal_patch_size": 2}
TOWERS: dict[str, dict[str, Any]] = {
    "qwen2_vl": {"depth": 2, "embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2, "num_heads": 2},
    "qwen2_5_vl": {
        "depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 64,
        "window_size": 56, "fullatt_block_indexes": [1],
    },
    "qwen3_vl": {
        "depth": 3, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 64,
        "num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1],
    },
    "llava": {
        "model_type": "clip_vision_model", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3,
        "num_attention_heads": 2, "patch_size": 14, "image_size": SIDE, "projection_dim": 32,
    },
}  # fmt: skip


def build_vision_model(directory: Path, seed: int = 0, kind: str = "qwen2_5_vl") -> Path:
    """Write model, tokenizer and processor."""
    import torch
    from transformers import AutoModelForImageTextToText

    tokenizer = character_tokenizer(FreshModelConfig(words=[START, END, IMAGE, VIDEO], max_position_embeddings=512))
    tokenizer.chat_template = CHAT_TEMPLATE.replace(CONTENT, fresh_model.PICTURE_CONTENT)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForImageTextToText.from_config(_config(kind, tokenizer)).float()
        if kind == "llava":  # whose configuration has no say in all of them
            for parameter in model.parameters():
                if parameter.ndim > 1:
                    torch.nn.init.normal_(parameter, std=DRAWN)
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = EOS_ID, PAD_ID
    model.save_pretrained(directory)
    _as_published(kind, directory)
    _processor(kind, tokenizer).save_pretrained(directory)
    return directory


def _as_published(kind: str, directory: Path) -> None:
    """Write a model's files as most of its kind are found.

    LLaVA: the weights of its tower have a prefix, which transformers takes off when it reads them, and does not write
    for a new model; vLLM knows them with it. Qwen2-VL, Qwen3-VL: sections of heads are in `rope_scaling`, where
    transformers now writes `rope_parameters`, and a Qwen2-VL's settings of text are not in `text_config`.
    """
    from safetensors.torch import load_file, save_file

    if kind == "llava":
        file = directory / "model.safetensors"
        weights = {name.replace("tower.", "tower.vision_model."): one for name, one in load_file(file).items()}
        save_file(weights, file, metadata={"format": "pt"})
    elif kind in ("qwen2_vl", "qwen3_vl"):
        config = json.loads((directory / "config.json").read_text())
        text = config["text_config"]
        rope = text.pop("rope_parameters")
        text["rope_theta"], name = rope.pop("rope_theta"), rope.pop("rope_type")
        text["rope_scaling"] = rope | ({"type": "mrope"} if kind == "qwen2_vl" else {"rope_type": name})
        if kind == "qwen2_vl":
            config = text | {name: value for name, value in config.items() if name != "text_config"}
            del config["layer_types"], config["head_dim"]
        (directory / "config.json").write_text(json.dumps(config))


def _config(kind: str, tokenizer: Any) -> Any:
    from transformers import AutoConfig

    ids, text = tokenizer.get_vocab(), TEXT | {"vocab_size": len(tokenizer), "initializer_range": DRAWN}
    if kind == "llava":
        text = text | {"model_type": "llama", "rope_parameters": ROPE}
        return AutoConfig.for_model(
            kind, text_config=text, vision_config=dict(TOWERS[kind]), image_token_index=ids[IMAGE],
            tie_word_embeddings=True,
        )  # fmt: skip
    tower = TOWERS[kind] | PATCHES | {"spatial_merge_size": 2, "initializer_range": DRAWN}
    rope = ROPE | SECTIONS[kind]
    text |= {"rope_parameters": rope}
    if kind == "qwen3_vl":  # what is added after the last layer goes nowhere
        text["num_hidden_layers"] = 3
    return AutoConfig.for_model(
        kind, text_config=text, vision_config=tower, image_token_id=ids[IMAGE],
        video_token_id=ids[VIDEO], vision_start_token_id=ids[START], vision_end_token_id=ids[END],
        tie_word_embeddings=True,
    )  # fmt: skip


def _processor(kind: str, tokenizer: Any) -> Any:
    """transformers' own, of tokens and pictures."""
    import transformers

    template = tokenizer.chat_template
    if kind == "llava":
        sizes: dict[str, Any] = {"size": {"shortest_edge": SIDE}, "crop_size": {"height": SIDE, "width": SIDE}}
        images = transformers.CLIPImageProcessor(**sizes)
        return transformers.LlavaProcessor(
            images, tokenizer, patch_size=14, vision_feature_select_strategy="default", image_token=IMAGE,
            num_additional_image_tokens=1, chat_template=template,
        )  # fmt: skip
    sizes = {"size": PIXELS, "merge_size": 2, **PATCHES}
    images, videos = transformers.Qwen2VLImageProcessor(**sizes), transformers.Qwen2VLVideoProcessor(**sizes)
    makers = {"qwen2_vl": "Qwen2VLProcessor", "qwen2_5_vl": "Qwen2_5_VLProcessor", "qwen3_vl": "Qwen3VLProcessor"}
    if kind == "qwen3_vl":
        videos = transformers.Qwen3VLVideoProcessor(**sizes)
    return getattr(transformers, makers[kind])(images, tokenizer, videos, chat_template=template)


def picture(height: int, width: int, seed: int = 0, kind: str = "PNG") -> bytes:
    """Encode a picture of noise."""
    from PIL import Image

    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    target = io.BytesIO()
    Image.fromarray(pixels).save(target, kind)
    return target.getvalue()

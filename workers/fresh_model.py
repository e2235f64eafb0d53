"""Makes a small Qwen2, Qwen3-MoE or Qwen2.5-VL with random weights and a character tokenizer, as a HF model directory.

For runs that bring no model (`model=tiny`), tests and benchmarks. It is made once, at the start of a run, in the run
directory; all other processes read it like any other HF model.

One that sees has a vision tower, an image processor and special tokens. A feature stands for 28 x 28 pixels. A picture
is resized to 1 to 16 features and keeps the shape that it has.
"""

from pathlib import Path
from typing import Any

from penstock.conf.errors import ConfigError, ModelError
from penstock.conf.model import FreshModelConfig
from penstock.workers.pictures.processor import FAMILIES, PictureProcessor, auto_class

PAD, BOS, EOS = "<pad>", "<bos>", "<eos>"
PAD_ID, BOS_ID, EOS_ID = 0, 1, 2
CHARACTERS = "Ċ" + "Ġ" + "".join(chr(code) for code in range(33, 127))
"""Characters of the vocabulary: newline, space and the other printable ASCII, spelled as byte-level BPE spells them."""
CONTENT = "{{ message['content'] }}"
CHAT_TEMPLATE = (
    f"{{% for message in messages %}}{CONTENT}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}"
    "{{ '\\n' if message['role'] != 'assistant' or not loop.last }}{% endfor %}"
)
"""Chat template: each turn's text and a newline; an assistant's turn ends with the end-of-sequence token."""
FAMILY = "qwen2_5_vl"
START, END, IMAGE, VIDEO = "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"
VISION_WORDS = (START, END, IMAGE, VIDEO)
"""Special tokens of vision, the last ones of the vocabulary."""
PICTURE_CONTENT = (
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


def character_vocabulary() -> dict[str, int]:
    """Token to id: special tokens first, then the characters. The order is part of saved models."""
    return {token: index for index, token in enumerate((PAD, BOS, EOS, *CHARACTERS))}


def vocabulary_size(config: FreshModelConfig) -> int:
    """Number of characters and words."""
    return len(character_vocabulary()) + len(words_of(config))


def words_of(config: FreshModelConfig) -> list[str]:
    """Strings that are one token each: the configured ones, and those that a model that sees has for its pictures."""
    return [*config.words, *(VISION_WORDS if config.num_vision_layers else ())]


def fresh_processor(config: FreshModelConfig) -> PictureProcessor:
    """The processor of a fresh model's pictures, which need not have been made. Raises `ConfigError` for a model of
    text."""
    if not config.num_vision_layers:
        raise ConfigError(
            "rollout.max_pictures: the fresh model is one of text. Set model.fresh.num_vision_layers, or leave it out."
        )
    return vision_processor(vocabulary_size(config) - len(VISION_WORDS))


def build_fresh_model(directory: str | Path, config: FreshModelConfig, seed: int) -> None:
    """Write model and tokenizer to `directory` (made if need be). Same config and seed: same bytes of weights.

    Raises `ModelError` when the sizes do not fit each other.
    """
    import torch

    _check_sizes(config)
    target = Path(directory)
    target.mkdir(parents=True, exist_ok=True)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        made = model_config(config, vocabulary_size(config))
        model = auto_class(made).from_config(made).float()
    model.generation_config.eos_token_id = EOS_ID
    model.generation_config.pad_token_id = PAD_ID
    model.generation_config.bos_token_id = BOS_ID
    _save(model, target)
    tokenizer = character_tokenizer(config)
    if config.num_vision_layers:
        save_processor(target, tokenizer)
    else:
        tokenizer.save_pretrained(target)


def _save(model: Any, target: Path) -> None:
    """Write what `save_pretrained` writes, which imports DeepSpeed, draws a progress bar, and takes two seconds."""
    from safetensors.torch import save_file

    from penstock.workers.weights.checkpoint_form import CheckpointForm

    form, tensors = CheckpointForm(model), {}
    for name, tensor in model.named_parameters():
        for part in form.parts(name, tuple(tensor.shape)):
            values = tensor.detach().flatten()[part.first : part.first + part.num_elements]
            tensors[part.name] = values.reshape(part.shape).clone()
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    model.config.architectures, model.config.dtype = [type(model).__name__], "float32"
    model.config.save_pretrained(target)
    model.generation_config.save_pretrained(target)


def _check_sizes(config: FreshModelConfig) -> None:
    if config.hidden_size % (2 * config.num_heads):
        raise ModelError(
            f"model.fresh.hidden_size={config.hidden_size} cannot be split into "
            f"model.fresh.num_heads={config.num_heads} heads of even size. Choose a multiple of {2 * config.num_heads}."
        )
    if config.num_heads % config.num_kv_heads:
        raise ModelError(
            f"model.fresh.num_heads={config.num_heads} is no multiple of "
            f"model.fresh.num_kv_heads={config.num_kv_heads}: each serves equally many."
        )
    head = config.hidden_size // config.num_heads
    if config.num_vision_layers and head % 16:
        raise ModelError(
            f"model.fresh.hidden_size={config.hidden_size} gives heads of {head} numbers, which cannot be split among "
            "the axes of a picture. Choose a multiple of 16 for each head."
        )


def model_config(config: FreshModelConfig, vocab_size: int) -> Any:
    """The configuration of transformers: a Qwen2's, with experts a Qwen3-MoE's, with a vision tower a Qwen2.5-VL's."""
    from transformers import Qwen2_5_VLConfig, Qwen2Config, Qwen3MoeConfig

    kind: Any = Qwen3MoeConfig if config.num_experts else Qwen2Config
    more: dict[str, Any] = {}
    if config.num_experts:
        more = {
            "num_experts": config.num_experts,
            "num_experts_per_tok": config.experts_per_token,
            "moe_intermediate_size": config.intermediate_size,
            "norm_topk_prob": True,
            "head_dim": config.hidden_size // config.num_heads,
        }
    text = dict(
        **more,
        vocab_size=vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        max_position_embeddings=config.max_position_embeddings,
        initializer_range=config.initializer_range,
        tie_word_embeddings=True,
        bos_token_id=BOS_ID,
        eos_token_id=EOS_ID,
        pad_token_id=PAD_ID,
        dtype="float32",
    )
    if not config.num_vision_layers:
        return kind(**text)
    eighth = config.hidden_size // config.num_heads // 8
    rope = {"rope_type": "default", "mrope_section": [eighth, 3 * eighth // 2, 3 * eighth // 2], "rope_theta": 10000.0}
    seen = vision_config(config, vocab_size - len(VISION_WORDS))
    return Qwen2_5_VLConfig(text_config=text | {"rope_parameters": rope}, tie_word_embeddings=True, **seen)


def character_tokenizer(config: FreshModelConfig) -> Any:
    """Make a tokenizer with a token for each character and each of `config.words`; text in equals text out, spaces
    included. Other bytes become the padding token.

    Qwen2's own class, since transformers loads that one for both of the models' types whatever the tokenizer's files
    say.
    Without merges its byte-level BPE leaves single bytes.
    """
    from tokenizers import AddedToken
    from transformers import Qwen2Tokenizer

    tokenizer = Qwen2Tokenizer(
        vocab=character_vocabulary(),
        merges=[],
        unk_token=PAD,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        model_max_length=config.max_position_embeddings,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.add_tokens([AddedToken(word, normalized=False) for word in words_of(config)])
    content = PICTURE_CONTENT if config.num_vision_layers else CONTENT
    tokenizer.chat_template = CHAT_TEMPLATE.replace(CONTENT, content)
    return tokenizer


def vision_config(config: FreshModelConfig, first_id: int) -> dict[str, Any]:
    """The vision part of a model's configuration. `first_id`: token of the first of `VISION_WORDS`."""
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
    start, end, image, video = range(first_id, first_id + len(VISION_WORDS))
    return {
        "vision_config": tower,
        "image_token_id": image,
        "video_token_id": video,
        "vision_start_token_id": start,
        "vision_end_token_id": end,
    }


def vision_processor(first_id: int) -> PictureProcessor:
    """The processor of a fresh model that sees, which need not have been made."""
    from transformers import Qwen2VLImageProcessorPil

    start, end, image, video = range(first_id, first_id + len(VISION_WORDS))
    return PictureProcessor(FAMILIES[FAMILY], [image, video, start, end], Qwen2VLImageProcessorPil(**SIZES))


def save_processor(directory: Path, tokenizer: Any) -> None:
    """Write the processor of a fresh model as vLLM and transformers load it, its tokenizer with it."""
    from transformers import Qwen2_5_VLProcessor, Qwen2VLImageProcessor, Qwen2VLVideoProcessor

    images, videos = Qwen2VLImageProcessor(**SIZES), Qwen2VLVideoProcessor(**SIZES)
    Qwen2_5_VLProcessor(images, tokenizer, videos, chat_template=tokenizer.chat_template).save_pretrained(directory)

"""Attention over packed rows and trees (`update/token_layout.py`): the models that can be called so, and the function
that they call.

    model.attention=sdpa               `attention`, below: torch's kernel for all blocks (`attention_kernels.py`) where
                                       it works, else one call of sdpa for all of one length; or `TreeAttention`, in
                                       which a token attends to its ancestors and itself
    model.attention=flash_attention_2  its kernel for sequences of different lengths, which transformers calls

transformers calls both by name, and hands on what the model was called with: so nothing of the model is changed.

A tree is computed by

    sdpa           on CPUs: a call for each block of queries, with the keys that they read and a mask
    FlexAttention  on GPUs: one call, whose kernel skips blocks that are masked; its backward needs a GPU

Unseen on a GPU. Tests on CPUs show FlexAttention's forward pass.
"""

import inspect
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention.bias import causal_lower_right
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from penstock.conf.errors import ConfigError
from penstock.conf.trainer import STREAM, TrainerConfig
from penstock.workers.trainer.models import attention_kernels
from penstock.workers.trainer.ranks import Ranks
from penstock.workers.trainer.update.token_layout import Blocks, Trees, mask_of

BLOCK_TOKENS = 128
"""Queries, and keys, of a block of FlexAttention's kernel."""
_LOG = logging.getLogger("penstock")


class TreeAttention:
    """Attention of one forward pass and its backward, all of whose layers share the masks.

    TreeAttention(trees)(module, query, key, value)
    """

    def __init__(self, trees: Trees) -> None:
        self._trees = trees

    def __call__(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, **keywords: Any
    ) -> tuple[Tensor, None]:
        """Attend. query, key, value: `[1, heads, T, D]`; returns `[1, T, heads, D]`. Places beyond the trees' tokens
        are padding; their output is 0."""
        num_tokens = self._trees.num_tokens
        padding = query.shape[2] - num_tokens
        if padding:
            query, key, value = (one[:, :, :num_tokens] for one in (query, key, value))
        attend = self.by_flex if query.is_cuda else self.by_blocks
        output = attend(module, query, key, value, **keywords)
        return nn.functional.pad(output, (0, 0, 0, 0, 0, padding)) if padding else output, None

    def by_blocks(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, **keywords: Any) -> Tensor:
        """Attend block by block: `[1, T, heads, D]`."""
        # The gradient of one split is one concatenation; that of each slice would be as large as the whole tensor.
        keys, values = (one.split(self._sizes, dim=2) for one in (key, value))
        queries = query.split([block.end - block.start for block in self._trees.blocks], dim=2)
        outputs = []
        for of_block, pieces, mask in zip(queries, self._pieces, self.masks, strict=True):
            k, v = (torch.cat([one[piece] for piece in pieces], dim=2) for one in (keys, values))
            ways = keywords | {"is_causal": mask is None}
            outputs.append(sdpa_attention_forward(module, of_block, k, v, mask, **ways)[0])
        return torch.cat(outputs, dim=1)

    def by_flex(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scaling: float | None = None,
        **keywords: Any,
    ) -> Tensor:
        """Attend by FlexAttention: `[1, T, heads, D]`."""
        output = _flex(query.is_cuda)(
            query, key, value, block_mask=self.block_mask, scale=scaling, enable_gqa=query.shape[1] != key.shape[1]
        )
        return output.transpose(1, 2).contiguous()

    @cached_property
    def block_mask(self) -> BlockMask:
        """The mask of all trees as FlexAttention takes it. Which blocks of keys a block of queries reads follows from
        where the keys' ends lie, so that no mask of all tokens by all tokens is made."""
        ends_T, num_tokens = self._trees.ends_T, self._trees.num_tokens

        def descends(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return (key <= query) & (query < ends_T[key])

        num_blocks = -(-num_tokens // BLOCK_TOKENS)
        ends_KB = nn.functional.pad(ends_T, (0, num_blocks * BLOCK_TOKENS - num_tokens)).view(-1, BLOCK_TOKENS)
        number_K = torch.arange(num_blocks, device=ends_T.device)
        number_Q1 = number_K.unsqueeze(1)
        is_before_QK = number_K < number_Q1
        is_read_QK = is_before_QK & (ends_KB.amax(1) > number_Q1 * BLOCK_TOKENS)
        is_whole_QK = is_before_QK & (ends_KB.amin(1) >= (number_Q1 + 1) * BLOCK_TOKENS)
        partly_QK = (is_read_QK & ~is_whole_QK) | (number_K == number_Q1)
        return BlockMask.from_kv_blocks(
            *_named_blocks(partly_QK), *_named_blocks(is_whole_QK), BLOCK_TOKENS, descends, (num_tokens, num_tokens)
        )

    @cached_property
    def masks(self) -> list[Tensor | None]:
        """Masks of the blocks, `[1, 1, queries, keys]`; None: causal."""
        ends_T = self._trees.ends_T
        return [None if block.is_causal else block.mask(ends_T)[None, None] for block in self._trees.blocks]

    @cached_property
    def _bounds(self) -> list[int]:
        """Bounds of pieces of keys, such that every block reads whole pieces."""
        return sorted({bound for block in self._trees.blocks for one in block.reads for bound in one})

    @cached_property
    def _sizes(self) -> list[int]:
        return [end - start for start, end in pairwise(self._bounds)]

    @cached_property
    def _pieces(self) -> list[list[int]]:
        """Pieces that each block reads."""
        numbers = {bound: number for number, bound in enumerate(self._bounds)}
        return [
            [piece for start, end in block.reads for piece in range(numbers[start], numbers[end])]
            for block in self._trees.blocks
        ]


class PartAttention:
    """Attention of a part of a row to the row's parts before it, and to itself; or of packed rows, each to itself.

    attention = PartAttention([earlier.own])
    attention(module, query, key, value)
    attention.own       # keys and values, for later parts
    """

    own: tuple[Tensor, Tensor]
    """The part's own keys and values, `[B, heads, T, D]`."""

    def __init__(self, past: Sequence[tuple[Tensor, Tensor]] = (), blocks: Blocks | None = None) -> None:
        """`past`: keys and values of the parts before. `blocks`: of packed rows, which have none before them."""
        self._past, self._blocks = past, blocks

    def __call__(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, **keywords: Any
    ) -> tuple[Tensor, None]:
        """Attend. query, key, value: `[B, heads, T, D]`; returns `[B, T, heads, D]`."""
        self.own = key, value
        if not self._past:
            return attention(module, query, key, value, None, **keywords, **{BLOCKS: self._blocks})
        keys, values = (torch.cat(parts, dim=2) for parts in zip(*self._past, self.own, strict=True))
        shape = query.shape[2], keys.shape[2]
        mask: Tensor
        if query.is_cuda:  # whose kernel needs no mask
            mask = causal_lower_right(*shape)
        else:
            mask = torch.ones(shape, dtype=torch.bool, device=query.device).tril(shape[1] - shape[0])
        output = nn.functional.scaled_dot_product_attention(
            query, keys, values, mask, scale=keywords.get("scaling"), enable_gqa=query.shape[1] != keys.shape[1]
        )
        return output.transpose(1, 2).contiguous(), None


class KeysKnown(Exception):
    """Raised by `KeysAlone`: there is nothing more to compute."""


class KeysAlone(PartAttention):
    """Stops a layer once the part's own keys and values are known."""

    def __call__(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, **_: Any) -> tuple[Tensor, None]:
        self.own = key, value
        raise KeysKnown


def _named_blocks(is_read_QK: Tensor) -> tuple[Tensor, Tensor]:
    """How many blocks of keys each block of queries reads, `[1, 1, Q]`, and their numbers first, `[1, 1, Q, K]`."""
    numbers_QK = is_read_QK.int().argsort(dim=-1, descending=True, stable=True)
    return is_read_QK.sum(-1).int()[None, None], numbers_QK.int()[None, None]


@lru_cache(maxsize=2)
def _flex(is_compiled: bool) -> Any:
    """FlexAttention, compiled to a kernel or not."""
    return torch.compile(flex_attention, dynamic=True) if is_compiled else flex_attention


KEY, TREES_KEY = "trainer.packing", "trainer.share_prefixes"
PACKED = "penstock_packed"
"""Name under which transformers knows `attention`."""
FLASH = "flash_attention_2"
BLOCKS = "blocks"
"""Keyword argument that passes blocks, a `TreeAttention` or a `PartAttention` from the model's call to `attention`;
None: padded rows."""
SHARING = frozenset({
    "apertus", "arcee", "bitnet", "cohere", "diffllama", "ernie4_5", "flex_olmo", "gemma", "glm", "glm4", "glm4_moe",
    "gpt2", "gpt_bigcode", "gpt_neox", "granite", "granitemoe", "granitemoeshared", "hunyuan_v1_dense",
    "hunyuan_v1_moe", "jais2", "llama", "minimax_m2", "ministral3", "mixtral", "nanochat", "olmo", "olmo2", "olmoe",
    "opt", "persimmon", "phi", "phi3", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "seed_oss", "smollm3", "starcoder2",
})  # fmt: skip
"""Kinds of models whose trees, and parts of rows, a test compares with rows alone. Others may count positions from
elsewhere (RoBERTa), or not pass arguments on to their attention (Nemotron)."""
ATTENDS_TWICE = frozenset({"diffllama"})
"""Those whose layers have keys and values of several attentions."""
FULL, SLIDING = "full_attention", "sliding_attention"
"""Names that transformers has for kinds of layers."""


def choose(lm: Any, packing: str, *, has_kernel: bool = False) -> bool:
    """Decide whether a model is called with packed rows, and prepare it for them. `packing`: `trainer.packing`.
    `has_kernel`: what `find_kernels` has found. Raises `ConfigError` where packing is asked for by name and the model
    cannot be called so."""
    implementation = lm.config._attn_implementation
    if packing == "never" or (packing == "auto" and implementation != FLASH and not has_kernel):
        return False
    reason = reason_against(lm)
    if reason is not None and packing == "always":
        raise ConfigError(f"{KEY}=always: {reason}. Set {KEY}=never.")
    if reason is None and implementation == "sdpa":
        text_model(lm).set_attn_implementation(PACKED)
    return reason is None


def choose_trees(lm: Any, sharing: str, *, is_compiled: bool, has_kernel: bool = True) -> str:
    """Decide whether a model is called with trees, and prepare it for them: `sharing` (`trainer.share_prefixes`), or
    never. `is_compiled`: its layers are, and attention would cut them apart. `has_kernel`: what `find_kernels` has
    found. Raises `ConfigError` where sharing is asked for by name and the model cannot be called so."""
    reason = reason_against_trees(lm)
    if reason is None and not has_kernel:
        reason = "FlexAttention, which computes trees on GPUs, does not work here: the rank's log says why"
    if sharing == "always" and reason is not None:
        raise ConfigError(f"{TREES_KEY}=always: {reason}. Set {TREES_KEY}=never.")
    if sharing == "never" or reason is not None or (sharing == "auto" and is_compiled):
        return "never"
    text_model(lm).set_attn_implementation(PACKED)
    return sharing


def prepare_parts(lm: Any) -> None:
    """Prepare a model for layers that are computed in parts of rows (`streamed_layers.py`). Raises `ConfigError` where
    they cannot be."""
    reason = reason_against_trees(lm)
    if lm.config.model_type in ATTENDS_TWICE:
        reason = f"{lm.config.model_type} attends twice in a layer"
    if reason is not None:
        raise ConfigError(
            f"trainer.activation_checkpointing={STREAM}: {reason}. Set trainer.activation_checkpointing=true."
        )
    text_model(lm).set_attn_implementation(PACKED)


@dataclass(frozen=True)
class Kernels:
    """Which kernels work on the rank's device."""

    packed: bool
    """True if torch's own flash-attention takes packed rows there."""
    trees: bool = True
    """False if FlexAttention is needed there, and does not work."""


def find_kernels(lm: Any, config: TrainerConfig, ranks: Ranks) -> Kernels:
    """Try the kernels that this model would be called with on a GPU: those count that work on all ranks. On a CPU there
    is nothing to try. Collective."""
    if ranks.device.type != "cuda" or lm.config._attn_implementation != "sdpa":
        return Kernels(packed=False)
    found = ranks.gather_ranks(_own_kernels(lm, config, ranks.device))
    return Kernels(all(one.packed for one in found), all(one.trees for one in found))


def _own_kernels(lm: Any, config: TrainerConfig, device: torch.device) -> Kernels:
    text, dtype = text_model(lm).config, getattr(torch, config.dtype)
    heads = text.num_attention_heads, getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    width = getattr(text, "head_dim", None) or text.hidden_size // heads[0]
    packs = config.packing != "never" and reason_against(lm) is None
    may_share = config.share_prefixes == "auto" and not (config.compile or config.streams_layers)
    shares = config.share_prefixes == "always" or may_share
    reason = None
    if shares and reason_against_trees(lm) is None:
        reason = reason_against_flex(device, dtype, heads, width)
    if reason is not None:
        _LOG.warning("%s=auto is never: FlexAttention does not work here: %s", TREES_KEY, reason)
    return Kernels(packs and attention_kernels.try_packed(device, dtype, width), reason is None)


def reason_against_flex(device: torch.device, dtype: torch.dtype, heads: tuple[int, int], width: int) -> str | None:
    """Why trees are not computed by FlexAttention; None: it computes what blocks of queries do. `heads`: of queries,
    and of keys."""
    random = np.random.default_rng(0)
    prompt, *responses = (random.integers(0, 9, length) for length in (200, 150, 90))
    trees, _ = Trees.of([np.concatenate([prompt, response]) for response in responses], np.zeros(2, np.int64))
    attention, module = TreeAttention(trees.to(device)), nn.Module()
    module.num_key_value_groups = heads[0] // heads[1]  # type: ignore[assignment]
    shapes = [(1, number, trees.num_tokens, width) for number in (heads[0], heads[1], heads[1])]
    flex, blocks = (partial(way, module, scaling=width**-0.5) for way in (attention.by_flex, attention.by_blocks))
    return attention_kernels.difference(flex, blocks, shapes, device, dtype)


def text_model(lm: Any) -> Any:
    """The part of a model that reads text: all of it, if it has no vision tower."""
    return getattr(lm.base_model, "language_model", lm)


def reason_against(lm: Any) -> str | None:
    """Why rows of this model cannot be packed; None: they can."""
    config = lm.config
    if config._attn_implementation not in ("sdpa", PACKED, FLASH):
        return f"rows are packed for sdpa and {FLASH}, and model.attention={config._attn_implementation}"
    kinds = set(getattr(config, "layer_types", None) or [FULL])
    if lm._is_stateful or not kinds <= {FULL, SLIDING}:
        known = ", ".join(sorted(kinds - {FULL})) or "recurrent ones"
        return f"{config.model_type} has layers ({known}) in which a row would see the one before it"
    takes = inspect.signature(lm.base_model.forward).parameters
    if not lm._supports_attention_backend or "position_ids" not in takes:
        return f"{type(lm).__name__} does not take the position of each token, or hand it on to its attention"
    return None


def reason_against_trees(lm: Any) -> str | None:
    """Why rows of this model cannot be computed as trees, nor in parts; None: they can."""
    config = lm.config
    if config._attn_implementation not in ("sdpa", PACKED):
        return f"it is for model.attention=sdpa, and that is {config._attn_implementation}"
    if text_model(lm) is not lm:
        return f"{config.model_type} is a vision model, and it is for models of text"
    if config.model_type not in SHARING:
        return f"{config.model_type} is none of the models in which it was compared with rows alone"
    windowed = SLIDING if getattr(config, "sliding_window", None) else FULL
    kinds = set(getattr(config, "layer_types", None) or [windowed])
    if kinds - {FULL}:
        return f"{config.model_type} has layers of {', '.join(sorted(kinds - {FULL}))}, and it wants full attention"
    return reason_against(lm)


def keywords(lm: Any, blocks: Blocks | Trees | None) -> dict[str, Any]:
    """Keyword arguments that call the base model with packed rows or trees; none where they are padded, for a model
    that is always called so."""
    if blocks is None:
        return {BLOCKS: None} if text_model(lm).config._attn_implementation == PACKED else {}
    if isinstance(blocks, Trees):
        return {"position_ids": blocks.position_ids_1T, BLOCKS: TreeAttention(blocks)}
    if lm.config._attn_implementation != FLASH:
        return {"position_ids": blocks.position_ids_1T, BLOCKS: blocks}
    longest = max(blocks.lengths)
    return {
        "position_ids": blocks.position_ids_1T,
        "cu_seq_lens_q": blocks.bounds,
        "cu_seq_lens_k": blocks.bounds,
        "max_length_q": longest,
        "max_length_k": longest,
    }


def attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | int | None, **keywords: Any
) -> tuple[Tensor, None]:
    """Causal attention within each block, or tree, or padded row. query, key, value: `[1, heads, T, D]`, of padded rows
    `[B, heads, T, D]`; returns `[1, T, heads, D]`. `attention_mask`: what `window_of` said of this layer. Raises
    `ConfigError` where the model keeps the blocks to itself, or makes a mask of its own."""
    if BLOCKS not in keywords or isinstance(attention_mask, Tensor):
        raise ConfigError(
            f"{KEY}, {TREES_KEY}: {type(module).__name__} does not hand on what its attention function is to know. Set "
            f"{KEY}=never and {TREES_KEY}=never."
        )
    blocks = keywords.pop(BLOCKS)
    if isinstance(blocks, TreeAttention | PartAttention):
        return blocks(module, query, key, value, **keywords)
    if blocks is None:
        mask = mask_of(query.shape[2], attention_mask, query.device)
        return sdpa_attention_forward(module, query, key, value, mask, **(keywords | {"is_causal": True}))
    has_more = keywords.get("position_bias") is not None or keywords.get("dropout")
    if attention_kernels.takes(query, value) and not has_more:
        bounds, longest = blocks.all_bounds(query.shape[2])
        output = attention_kernels.packed(query, key, value, bounds, longest, attention_mask, keywords.get("scaling"))
        return output, None
    runs = list(blocks.runs(query.shape[2]))
    # One split, whose gradient is one concatenation: that of a slice is as large as what it was cut from.
    sizes = [count * length for count, length in runs]
    parts = []
    for (count, length), *of_run in zip(runs, *(one.split(sizes, dim=2) for one in (query, key, value)), strict=True):
        mask = mask_of(length, attention_mask, query.device)
        q, k, v = (one.squeeze(0).unflatten(1, (count, length)).transpose(0, 1) for one in of_run)
        output, _ = sdpa_attention_forward(module, q, k, v, mask, **(keywords | {"is_causal": True}))
        parts.append(output.flatten(0, 1))
    return torch.cat(parts).unsqueeze(0), None


def window_of(*, local_size: int | None = None, **_: Any) -> int | None:
    """Answer in the place of the mask that transformers wants for a kind of layer, once a forward pass: how many tokens
    its sliding window has; None: it attends to all."""
    return local_size


# Blocks differ from one micro-batch to the next, and for each of them attention would be compiled anew.
AttentionInterface.register(PACKED, torch.compiler.disable(attention))
AttentionMaskInterface.register(PACKED, window_of)

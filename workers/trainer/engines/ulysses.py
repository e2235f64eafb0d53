"""Sequence parallelism (DeepSpeed-Ulysses, 2309.14509): ranks that split the tokens of the same rows, so that long ones
fit.

    each rank: tokens [B, L/P] ─▶ layers ─▶ hidden states [B, L/P] ─▶ log-probabilities of its own tokens ─▶ all of them
    in attention: [B, heads, L/P] ─▶ all-to-all ─▶ [B, heads/P, L] ─▶ sdpa ─▶ all-to-all ─▶ [B, heads, L/P]

Everything else in a layer looks at one token at a time and so needs no other rank. Each rank gets the whole answer and
computes the same loss; gradients flow back to the rank whose token it was, and FSDP2 sums them. The model is as it was
but for the name of its attention and a hook that adds the positions of its tokens.

Legend: B rows, L padded tokens, P ranks that split them, N places asked for, D width of a head.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from penstock.conf.errors import ConfigError
from penstock.workers.trainer.models import packed_attention
from penstock.workers.trainer.update.picture_places import Pictures
from penstock.workers.trainer.update.token_layout import PAD_ID

KEY = "trainer.sequence_parallel_size"
ATTENTION = "penstock_ulysses"
"""Name under which transformers knows `attention`."""
PEERS = "sequence_peers"
"""Keyword argument that passes the process group from the model's call to `attention`; None: this rank is alone."""
HEADS = ("num_attention_heads", "num_key_value_heads")


class SequenceParallel:
    """Calls a model on this rank's share of the tokens.

    sequence = SequenceParallel(model.lm, [1, 2], {2: ranks.process_group(1, 2)})
    logprobs_N, entropy_N = sequence(model, input_ids_BL, positions_N, targets_N, "value")
    sequence.split_over(1)    # from now on each rank calls it on rows of its own
    """

    def __init__(
        self, lm: Any, sizes: list[int], groups: Mapping[int, dist.ProcessGroup], tensor_parallel_size: int = 1
    ) -> None:
        """`sizes`: that a group of ranks may have, ascending. `groups`: the one with this rank, of each size above 1.
        `tensor_parallel_size`: what heads are divided by already. Raises `ConfigError` for a model whose attention
        cannot be split."""
        self.sizes, self._groups = sizes, groups
        check(lm, sizes[-1], tensor_parallel_size)
        self.split_over(None)
        text = packed_attention.text_model(lm)
        text.set_attn_implementation(ATTENTION)
        text.base_model.register_forward_pre_hook(self._add_positions, with_kwargs=True)

    def split_over(self, size: int | None) -> None:
        """Have groups of `size` ranks split what is computed from now on; None: of the largest."""
        self._size = size or self.sizes[-1]
        self._peers = self._groups.get(self._size)
        self._rank = 0 if self._peers is None else self._peers.rank()

    def _add_positions(self, module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        """Add the positions of the base model's tokens in the whole row to its arguments."""
        read = keywords["input_ids"] if keywords.get("inputs_embeds") is None else keywords["inputs_embeds"]
        width = read.shape[1]
        if (positions := keywords.get("position_ids")) is None:
            positions = torch.arange(width * self._size, device=read.device).unsqueeze(0)
        padded = functional.pad(positions, (0, width * self._size - positions.shape[-1]))
        own = padded[..., self._rank * width : (self._rank + 1) * width]
        return arguments, keywords | {"position_ids": own, PEERS: self._peers}

    def __call__(self, model: nn.Module, input_ids_BL: Tensor | None, positions_N: Tensor, *rest: Any) -> Any:
        """Return what `model` answers for all places, on every rank. `rest`: further arguments, of which tensors are
        `[N]`. Of pictures each rank computes all, and reads the features that belong to its own tokens. Collective over
        the P ranks."""
        if input_ids_BL is None or self._peers is None:  # pictures alone, or this rank
            return model(input_ids_BL, positions_N, *rest)
        length = input_ids_BL.shape[1]
        width = -(-length // self._size)
        padded_BL = functional.pad(input_ids_BL, (0, width * self._size - length), value=PAD_ID)
        row_N, token_N = positions_N // length, positions_N % length
        own = torch.nonzero(token_N // width == self._rank).squeeze(1)
        answers = model(
            padded_BL[:, self._rank * width : (self._rank + 1) * width],
            (row_N * width + token_N % width).index_select(0, own),
            *(self._own(value, own, width, length) for value in rest),
        )
        if isinstance(answers, tuple):
            return tuple(self._whole(answer, own, len(positions_N)) for answer in answers)
        return self._whole(answers, own, len(positions_N))

    def _own(self, value: Any, own: Tensor, width: int, length: int) -> Any:
        """What this rank needs of a further argument."""
        if isinstance(value, Pictures):
            return value.columns(self._rank * width, width, length)
        return value.index_select(0, own) if isinstance(value, Tensor) else value

    def _whole(self, answer: Tensor | None, own: Tensor, count: int) -> Tensor | None:
        return None if answer is None else _Whole.apply(answer, own, count, self._peers)


def attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **keywords: Any
) -> tuple[Tensor, None]:
    """Causal attention over all tokens of the row, or of each of its blocks. query, key, value: `[B, heads, L/P, D]`;
    returns `[B, L/P, heads, D]`."""
    if PEERS not in keywords:
        raise ConfigError(
            f"{KEY}: {type(module).__name__} does not hand on what its attention function is to know. Set {KEY}=1."
        )
    peers = keywords.pop(PEERS)
    if peers is not None:
        query, key, value = (_by_heads(tensor, peers) for tensor in (query, key, value))
    attend = packed_attention.attention if packed_attention.BLOCKS in keywords else sdpa_attention_forward
    output, _ = attend(module, query, key, value, None, **(keywords | {"is_causal": True}))
    if peers is not None:
        output = _by_tokens(output.transpose(1, 2), peers).transpose(1, 2).contiguous()
    return output, None


AttentionInterface.register(ATTENTION, attention)


def _by_heads(tensor: Tensor, peers: dist.ProcessGroup) -> Tensor:
    """Turn `[B, heads, L/P, D]` into `[B, heads/P, L, D]`."""
    parts = peers.size()
    rows, heads, length, width = tensor.shape
    sent = tensor.reshape(rows, parts, heads // parts, length, width).transpose(0, 1)
    received = _AllToAll.apply(sent, peers)  # [P of tokens, B, heads/P, L/P, D]
    return received.permute(1, 2, 0, 3, 4).reshape(rows, heads // parts, parts * length, width)


def _by_tokens(tensor: Tensor, peers: dist.ProcessGroup) -> Tensor:
    """Turn `[B, heads/P, L, D]` into `[B, heads, L/P, D]`."""
    parts = peers.size()
    rows, heads, length, width = tensor.shape
    sent = tensor.reshape(rows, heads, parts, length // parts, width).permute(2, 0, 1, 3, 4)
    received = _AllToAll.apply(sent, peers)  # [P of heads, B, heads/P, L/P, D]
    return received.transpose(0, 1).reshape(rows, parts * heads, length // parts, width)


class _AllToAll(torch.autograd.Function):
    """Exchange of the parts of `[P, ...]`: part i goes to rank i, and what rank i sent becomes part i. Its own
    transpose."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, peers: dist.ProcessGroup) -> Tensor:
        ctx.peers = peers
        return _exchange(parts, peers)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _exchange(gradients[0], ctx.peers), None


class _Whole(torch.autograd.Function):
    """Places of all ranks put together, the same on every rank. Every rank computes the same loss of them, so that the
    gradient of a place is already whole on the rank that owns it."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, own: Tensor, count: int, peers: dist.ProcessGroup) -> Tensor:
        ctx.save_for_backward(own)
        whole_N = values.new_zeros(count, *values.shape[1:]).index_copy(0, own, values)
        dist.all_reduce(whole_N, group=peers)
        return whole_N

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        (own,) = ctx.saved_tensors
        return gradients[0].index_select(0, own), None, None, None


def _exchange(parts: Tensor, peers: dist.ProcessGroup) -> Tensor:
    parts = parts.contiguous()
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts, group=peers)
    return received


def heads_of(lm: Any) -> list[int]:
    """Numbers of a model's heads: of queries, and of keys and values; those that its configuration names."""
    config = packed_attention.text_model(lm).config
    return [heads for name in HEADS if (heads := getattr(config, name, None))]


def check(lm: Any, size: int, tensor_parallel_size: int) -> None:
    """Raise `ConfigError` for a model whose attention cannot be split over `size` ranks, each of which has its heads
    divided by `tensor_parallel_size` already."""
    config = packed_attention.text_model(lm).config
    if config._attn_implementation not in ("sdpa", packed_attention.PACKED):
        raise ConfigError(
            f"{KEY}={size} computes attention by sdpa, and model.attention={config._attn_implementation}. Set "
            f"model.attention=sdpa or {KEY}=1."
        )
    for name in HEADS:
        heads = getattr(config, name, size * tensor_parallel_size)
        if heads % (size * tensor_parallel_size):
            raise ConfigError(
                f"{KEY}={size} times trainer.tensor_parallel_size={tensor_parallel_size} must divide the model's "
                f"{name}={heads}: each rank attends with its share of the heads. Lower one of them."
            )
    windowed = "sliding_attention" if getattr(config, "sliding_window", None) else "full_attention"
    kinds = set(getattr(config, "layer_types", None) or [windowed])
    if kinds != {"full_attention"}:
        raise ConfigError(
            f"{KEY}={size}: {config.model_type} has layers of {', '.join(sorted(kinds))}, and sequence parallelism "
            f"knows full attention only. Set {KEY}=1."
        )

"""Decoder layers that are computed in chunks of tokens, forward and backward (StreamBP, 2506.03077): what a layer makes
of a whole row beside its input and output is never there at once.

    forward     chunk 0 ─▶ chunk 1 ─▶ chunk 2     each attends to the keys and values of those before it, too
    backward    keys and values of 0 and 1 again, then chunk 2 ─▶ chunk 1 ─▶ chunk 0: each is computed once more, and
                its gradient is that of its output, and of its keys and values from the chunks after it

Only the layer's input is kept, as where it is recomputed whole. Chunks end where rows end, if those are short. All in a
layer but attention looks at one token at a time, so that results are those of the whole layer, but for rounding.

Gradients of parameters are summed over chunks in float32 at least, and given to autograd once: an engine that reduces
gradients layer by layer sees what it sees of a plain layer.

Legend: B rows, L padded tokens, H hidden size.
"""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.func import functional_call

from penstock.conf.trainer import CHUNK_TOKENS, CPU_CHUNK_TOKENS
from penstock.workers.trainer.models.packed_attention import BLOCKS, KeysAlone, KeysKnown, PartAttention
from penstock.workers.trainer.update.token_layout import Blocks


class StreamedLayer(nn.Module):
    """A decoder layer that takes the place of the one it is made of, and has its modules. `prepare_parts` has prepared
    the model."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self._whole = (layer,)  # no child of this one, so that parameters keep their names
        for name, child in layer.named_children():
            self.add_module(name, child)
        self.training = layer.training

    def forward(self, hidden_BLH: Tensor, *arguments: Any, **keywords: Any) -> Tensor:
        most = CPU_CHUNK_TOKENS if hidden_BLH.is_cpu else CHUNK_TOKENS
        segments = tuple(segments_of(hidden_BLH.shape[:2], keywords.pop(BLOCKS), most))
        call = LayerCall(self._whole[0], hidden_BLH.shape[:2], segments, arguments, keywords)
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        output_BLH: Tensor = _Streamed.apply(call, hidden_BLH, *trained)
        return output_BLH


@dataclass(frozen=True)
class Segment:
    """Tokens that attend to none but one another."""

    rows: slice
    parts: tuple[slice, ...]
    """Tokens of the rows that are computed at a time."""
    blocks: Blocks | None = None
    """The blocks of the only part; None: each row is one."""


def segments_of(shape: tuple[int, ...], blocks: Blocks | None, most: int) -> Iterator[Segment]:
    """Cut `[B, L]` tokens into parts of at most `most`: whole rows, or blocks of packed ones, together, and longer ones
    into parts of their own."""
    num_rows, num_tokens = shape
    if blocks is None:
        count = max(1, most // num_tokens)
        for row in range(0, num_rows, count):
            yield Segment(slice(row, row + count), _parts(0, num_tokens, most))
        return
    first = start = 0
    while first < len(blocks.lengths):
        last, end = first + 1, start + blocks.lengths[first]
        while last < len(blocks.lengths) and end + blocks.lengths[last] - start <= most:
            last, end = last + 1, end + blocks.lengths[last]
        several = blocks.some(first, last) if last > first + 1 else None
        yield Segment(slice(0, 1), _parts(start, end, most), several)
        first, start = last, end


def _parts(start: int, end: int, most: int) -> tuple[slice, ...]:
    """As few parts of at most `most` tokens as possible, of equal sizes."""
    count = -(-(end - start) // most)
    bounds = [start + (end - start) * number // count for number in range(count + 1)]
    return tuple(slice(*pair) for pair in pairwise(bounds))


@dataclass(frozen=True)
class LayerCall:
    """A layer and what it was called with, beside its hidden states."""

    layer: nn.Module
    shape: tuple[int, ...]
    segments: tuple[Segment, ...]
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]

    def of_part(
        self, hidden: Tensor, place: tuple[slice, slice], attention: PartAttention, parameters: dict[str, Tensor]
    ) -> Tensor:
        """The layer's output for some tokens of some rows, `place`. `hidden`: theirs. `parameters`: the layer's, by
        name."""
        arguments = hidden, *(self._cut(value, place) for value in self.arguments)
        keywords = {name: self._cut(value, place) for name, value in self.keywords.items()}
        keywords[BLOCKS] = attention
        output: Tensor = functional_call(self.layer, parameters, arguments, keywords, tie_weights=False)
        return output

    def _cut(self, value: Any, place: tuple[slice, slice]) -> Any:
        """What a part gets of a value: of positions and their embeddings, `[B, L, …]` or `[1, L, …]`, its own."""
        if isinstance(value, tuple):
            return tuple(self._cut(one, place) for one in value)
        if not isinstance(value, Tensor) or value.dim() < 2 or value.shape[1] != self.shape[1]:
            return value
        rows, tokens = place
        return value[rows if len(value) > 1 else slice(None), tokens]


class _Streamed(torch.autograd.Function):
    """A layer's output for its hidden states. Parameters are arguments for autograd to know of; their values are those
    that the layer has when it is called: engines may have given them other memory."""

    @staticmethod
    def forward(ctx: Any, call: LayerCall, hidden_BLH: Tensor, *trained: Tensor) -> Tensor:
        ctx.call = call
        ctx.save_for_backward(hidden_BLH)
        output_BLH = torch.empty_like(hidden_BLH)
        for segment in call.segments:
            past: list[tuple[Tensor, Tensor]] = []
            for tokens in segment.parts:
                place, attention = (segment.rows, tokens), PartAttention(past, segment.blocks)
                output_BLH[place] = call.of_part(hidden_BLH[place].detach(), place, attention, {})
                past.append(attention.own)
        return output_BLH

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BLH: Tensor) -> tuple[Tensor | None, ...]:
        (hidden_BLH,) = ctx.saved_tensors
        parameters = {name: _leaf(one, one.requires_grad) for name, one in ctx.call.layer.named_parameters()}
        grad_hidden_BLH = torch.empty_like(hidden_BLH)
        for segment in ctx.call.segments:
            for place, gradient in _part_gradients(ctx.call, segment, hidden_BLH, grad_BLH, parameters):
                grad_hidden_BLH[place] = gradient
        return None, grad_hidden_BLH, *(_taken(one) for one in parameters.values() if one.requires_grad)


def _part_gradients(
    call: LayerCall, segment: Segment, hidden_BLH: Tensor, grad_BLH: Tensor, parameters: dict[str, Tensor]
) -> Iterator[tuple[tuple[slice, slice], Tensor]]:
    """The place and the gradient of each part's hidden states, the last part first. Gradients of parameters add up in
    theirs."""
    *before, _ = places = [(segment.rows, tokens) for tokens in segment.parts]
    past = [_keys_and_values(call, place, hidden_BLH[place], parameters) for place in before]
    of_keys: list[Tensor] = []
    """Gradients of the part's keys and values from the parts after it."""
    for place in reversed(places):
        hidden, attention = hidden_BLH[place].detach().requires_grad_(), PartAttention(past, segment.blocks)
        with torch.enable_grad():
            output = call.of_part(hidden, place, attention, parameters)
        keys = attention.own[: len(of_keys)]
        of_own = [gradient.to(own.dtype) for own, gradient in zip(keys, of_keys, strict=True)]
        torch.autograd.backward([output, *keys], [grad_BLH[place], *of_own])
        of_keys = [_gradient(one) for one in past.pop()] if past else []
        yield place, _gradient(hidden)


def _keys_and_values(
    call: LayerCall, place: tuple[slice, slice], hidden: Tensor, parameters: dict[str, Tensor]
) -> tuple[Tensor, Tensor]:
    """Keys and values of a part, to which gradients can be added."""
    attention = KeysAlone()
    with suppress(KeysKnown), torch.no_grad():
        call.of_part(hidden, place, attention, parameters)
    key, value = attention.own
    return _leaf(key), _leaf(value)


def _leaf(tensor: Tensor, requires_grad: bool = True) -> Tensor:
    """The tensor apart from what made it. Its gradients add up in float32 at least."""
    leaf = tensor.detach().requires_grad_(requires_grad)
    if requires_grad:
        leaf.grad_dtype = torch.promote_types(tensor.dtype, torch.float32)
    return leaf


def _gradient(leaf: Tensor) -> Tensor:
    assert leaf.grad is not None
    return leaf.grad


def _taken(leaf: Tensor) -> Tensor | None:
    """The leaf's gradient in its own dtype, which the leaf has no more."""
    gradient, leaf.grad = leaf.grad, None
    return None if gradient is None else gradient.to(leaf.dtype)

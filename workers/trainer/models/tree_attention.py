"""Attention over trees of sequences (`update/trees.py`): each token attends to its ancestors and itself.

    CPUs  a call of sdpa for each block of queries, with the keys that they read and a mask
    GPUs  one call of FlexAttention, whose kernel skips blocks that are masked; its backward needs a GPU

Unseen on a GPU. Tests on CPUs show FlexAttention's forward pass.
"""

from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from penstock.workers.trainer.update.trees import Trees

BLOCK_TOKENS = 128
"""Queries, and keys, of a block of FlexAttention's kernel."""


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


def _named_blocks(is_read_QK: Tensor) -> tuple[Tensor, Tensor]:
    """How many blocks of keys each block of queries reads, `[1, 1, Q]`, and their numbers first, `[1, 1, Q, K]`."""
    numbers_QK = is_read_QK.int().argsort(dim=-1, descending=True, stable=True)
    return is_read_QK.sum(-1).int()[None, None], numbers_QK.int()[None, None]


@lru_cache(maxsize=2)
def _flex(is_compiled: bool) -> Any:
    """FlexAttention, compiled to a kernel or not."""
    return torch.compile(flex_attention, dynamic=True) if is_compiled else flex_attention

"""FlexAttention is asked for what blocks of queries compute, as far as a CPU can tell: its backward is for GPUs."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask

from penstock.workers.trainer.models.packed_attention import TreeAttention
from penstock.workers.trainer.update.token_layout import Trees


class Layer(nn.Module):
    num_key_value_groups = 2


@pytest.fixture
def trees() -> Trees:
    random = np.random.default_rng(0)
    prompt, answer = random.integers(3, 90, 300), random.integers(3, 90, 30)
    parts = [random.integers(3, 90, 40) for _ in range(5)]
    sequences = [np.concatenate([prompt, part]) for part in parts[:3]]
    sequences += [np.concatenate([prompt, answer, part]) for part in parts[3:]]
    found, _ = Trees.of([*sequences, prompt[:50]], np.array([0, 0, 0, 0, 0, 1]))
    return found


def inputs(num_tokens: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(1, heads, num_tokens, 16, generator=generator, dtype=torch.float64) for heads in (4, 2, 2)]


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_has_the_answers_of_blocks(trees: Trees) -> None:
    attention, read = TreeAttention(trees), inputs(trees.num_tokens)
    ways = {"scaling": 0.3, "dropout": 0.0}
    with torch.no_grad():
        blocks, flex = attention.by_blocks(Layer(), *read, **ways), attention.by_flex(Layer(), *read, **ways)
    torch.testing.assert_close(flex, blocks, atol=1e-12, rtol=0)


def test_what_is_beyond_the_trees_is_padding(trees: Trees) -> None:
    whole, _ = TreeAttention(trees)(Layer(), *inputs(trees.num_tokens + 5), scaling=0.3)
    alone, _ = TreeAttention(trees)(Layer(), *(one[:, :, :-5] for one in inputs(trees.num_tokens + 5)), scaling=0.3)
    assert whole.shape == (1, trees.num_tokens + 5, 4, 16)
    torch.testing.assert_close(whole[:, :-5], alone)
    assert (whole[:, -5:] == 0).all()


def test_masks_are_kept_for_all_layers(trees: Trees) -> None:
    attention, read = TreeAttention(trees), inputs(trees.num_tokens)
    attention(Layer(), *read)
    masks = attention.masks
    attention(Layer(), *read)
    assert attention.masks is masks
    assert sum(mask is None for mask in masks) == 2  # the prompt's run, and the sequence that is a tree of its own


@pytest.mark.parametrize("lengths", [[40], [128, 128], [300, 40, 40], [700, 200, 130, 20], [2, 900]])
def test_blocks_that_are_read_are_those_that_a_whole_mask_has(lengths: list[int]) -> None:
    """A prompt, answers to it, and the same with another prompt behind them."""
    random = np.random.default_rng(len(lengths))
    prompt, *parts = (random.integers(3, 90, length) for length in lengths)
    sequences = [np.concatenate([prompt, part]) for part in parts] or [prompt]
    trees, _ = Trees.of([*sequences, *(one[1:] for one in sequences)], np.repeat([0, 1], len(sequences)))
    found, size = TreeAttention(trees).block_mask, trees.num_tokens
    assert found.mask_mod is not None
    expected = create_block_mask(found.mask_mod, None, None, size, size, device="cpu")
    assert found.shape == expected.shape
    for name in ("kv_num_blocks", "full_kv_num_blocks", "q_num_blocks", "full_q_num_blocks"):
        torch.testing.assert_close(getattr(found, name), getattr(expected, name), msg=name)
    for name in ("kv", "full_kv", "q", "full_q"):
        counts = getattr(found, f"{name}_num_blocks").unsqueeze(-1)
        there, wanted = (getattr(one, f"{name}_indices") for one in (found, expected))
        is_named = torch.arange(there.shape[-1]) < counts
        assert torch.equal(there[is_named], wanted[is_named]), name

"""Trees have every sequence, each token once a beginning, and attention that knows its ancestors alone."""

from itertools import pairwise

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from penstock.workers.trainer.update import token_layout as module
from penstock.workers.trainer.update.token_layout import Trees

PROMPT = list(range(100, 120))
SEQUENCES = st.lists(
    st.tuples(st.integers(0, 2), st.lists(st.integers(1, 3), min_size=1, max_size=40)), min_size=1, max_size=12
)
"""Group of each sequence and its tokens, few of which are different."""


def arrays(*sequences: list[int]) -> list[np.ndarray]:
    return [np.asarray(one, np.int32) for one in sequences]


def attended(trees: Trees) -> np.ndarray:
    """What each token attends to by the blocks, `[T, T]` bool."""
    seen = np.zeros((trees.num_tokens, trees.num_tokens), bool)
    for block in trees.blocks:
        keys = np.concatenate([np.arange(*one) for one in block.reads])
        mask = block.mask(trees.ends_T).numpy()
        if block.is_causal:
            assert (mask == np.tri(len(keys), dtype=bool)).all()
        seen[np.ix_(range(block.start, block.end), keys)] = mask
    return seen


def assert_paths(sequences: list[np.ndarray], trees: Trees, places: list[np.ndarray]) -> None:
    """Each token's ancestors are the tokens before it in its sequence, and nothing else."""
    seen = attended(trees)
    for ids, path in zip(sequences, places, strict=True):
        assert (trees.position_ids_1T[0, path].numpy() == np.arange(len(ids))).all()
        for length, place in enumerate(path.tolist()):
            assert np.flatnonzero(seen[place]).tolist() == sorted(path[: length + 1].tolist())


@given(SEQUENCES, st.integers(1, 4), st.integers(1, 50))
def test_each_token_attends_to_what_is_before_it_in_its_sequence(
    drawn: list[tuple[int, list[int]]], least: int, block: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "LEAST_SHARED", least)
        patch.setattr(module, "QUERY_TOKENS", block)
        groups, sequences = np.array([group for group, _ in drawn]), arrays(*(ids for _, ids in drawn))
        trees, places = Trees.of(sequences, groups)
    assert_paths(sequences, trees, places)
    flat = np.zeros(trees.num_tokens, np.int64)
    for ids, path in zip(sequences, places, strict=True):
        flat[path] = ids
    assert all((flat[path] == ids).all() for ids, path in zip(sequences, places, strict=True))
    for group_a, group_b, one, other in (
        (groups[a], groups[b], places[a], places[b]) for a in range(len(places)) for b in range(a)
    ):
        common = np.intersect1d(one, other)
        assert not len(common) or (group_a == group_b and len(common) >= least)


@given(SEQUENCES, st.integers(1, 50))
def test_blocks_are_all_tokens_in_their_order(drawn: list[tuple[int, list[int]]], block: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "LEAST_SHARED", 1)
        patch.setattr(module, "QUERY_TOKENS", block)
        trees, _ = Trees.of(arrays(*(ids for _, ids in drawn)), np.array([group for group, _ in drawn]))
    ends = [block.end for block in trees.blocks]
    assert [block.start for block in trees.blocks] == [0, *ends[:-1]]
    assert ends[-1] == trees.num_tokens
    for one in trees.blocks:
        assert one.reads[-1][1] == one.end
        assert all(first[1] < second[0] for first, second in pairwise(one.reads))


def test_the_prompt_of_a_group_is_there_once() -> None:
    sequences = arrays([*PROMPT, 1, 2], [*PROMPT, 3], [*PROMPT, 1, 4, 5])
    trees, places = Trees.of(sequences, np.zeros(3))
    assert trees.num_tokens == len(PROMPT) + 1 + 1 + 2 + 1
    assert len({path[len(PROMPT) - 1] for path in places}) == 1
    assert places[0][len(PROMPT)] == places[2][len(PROMPT)] != places[1][len(PROMPT)]


def test_a_sequence_that_another_begins_with_adds_nothing() -> None:
    trees, places = Trees.of(arrays(PROMPT, [*PROMPT, 1], PROMPT), np.zeros(3))
    assert trees.num_tokens == len(PROMPT) + 1
    assert (places[0] == places[2]).all()


def test_short_beginnings_and_other_groups_are_not_shared() -> None:
    assert Trees.of(arrays([7, 7, 1], [7, 7, 2]), np.zeros(2))[0].num_tokens == 6
    assert Trees.of(arrays(PROMPT, PROMPT), np.array([0, 1]))[0].num_tokens == 2 * len(PROMPT)


def test_a_long_prompt_is_causal_and_its_samples_read_it_and_themselves() -> None:
    random = np.random.default_rng(0)
    prompt = random.integers(3, 90, 600)
    trees, _ = Trees.of([np.concatenate([prompt, random.integers(3, 90, 200)]) for _ in range(3)], np.zeros(3))
    assert [(one.start, one.end, one.reads, one.is_causal) for one in trees.blocks] == [
        (0, 600, ((0, 600),), True),
        (600, 800, ((0, 800),), False),
        (800, 1000, ((0, 600), (800, 1000)), False),
        (1000, 1200, ((0, 600), (1000, 1200)), False),
    ]

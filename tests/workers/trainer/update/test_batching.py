from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.conf.errors import DataError
from penstock.store.data.rows import Rows
from penstock.workers.trainer.update import batching
from penstock.workers.trainer.update.minibatches import share_of_rank
from tests.amounts import amount

LENGTHS = st.lists(st.integers(1, 40), max_size=30)


@given(LENGTHS, st.integers(1, 200))
def test_every_row_is_in_exactly_one_microbatch(lengths: list[int], budget: int) -> None:
    cuts = batching.plan(np.array(lengths, dtype=np.int64), budget)
    assert sorted(np.concatenate(cuts).tolist() if cuts else []) == list(range(len(lengths)))


@given(LENGTHS, st.integers(1, 200))
def test_padded_tokens_keep_the_budget_unless_one_row_alone_exceeds_it(lengths: list[int], budget: int) -> None:
    for cut in batching.plan(np.array(lengths, dtype=np.int64), budget):
        longest = max(lengths[position] for position in cut)
        assert len(cut) * longest <= budget or len(cut) == 1


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(0, 60)), max_size=30), st.integers(1, 200))
def test_padded_tokens_and_pictures_keep_the_budget_together(rows: list[tuple[int, int]], budget: int) -> None:
    lengths, seen = (np.array([row[number] for row in rows], np.int64) for number in (0, 1))
    alone = np.arange(len(rows))
    for cuts in (
        batching.plan(lengths, budget, picture_tokens=seen),
        batching.plan_groups(lengths, alone, budget, picture_tokens=seen),
    ):
        assert sorted(np.concatenate(cuts).tolist() if cuts else []) == list(range(len(rows)))
        for cut in cuts:
            assert len(cut) * lengths[cut].max() + seen[cut].sum() <= budget or len(cut) == 1


@given(LENGTHS, st.integers(1, 200))
def test_pictures_that_are_worth_nothing_change_no_plan(lengths: list[int], budget: int) -> None:
    rows = np.array(lengths, np.int64)
    for plain, seen in zip(
        batching.plan(rows, budget), batching.plan(rows, budget, picture_tokens=np.zeros_like(rows)), strict=True
    ):
        assert plain.tolist() == seen.tolist()


@given(LENGTHS, st.integers(1, 200))
def test_a_plan_costs_no_more_than_one_microbatch_a_row_or_filling_up_greedily(lengths: list[int], budget: int) -> None:
    def cost(cuts: list[list[int]]) -> int:
        return sum(len(cut) * max(cut) + batching.MICROBATCH_COST_TOKENS for cut in cuts)

    greedy: list[list[int]] = []
    for length in sorted(lengths, reverse=True):
        if greedy and (len(greedy[-1]) + 1) * greedy[-1][0] <= budget:
            greedy[-1].append(length)
        else:
            greedy.append([length])
    planned = [
        [lengths[position] for position in cut] for cut in batching.plan(np.array(lengths, dtype=np.int64), budget)
    ]
    assert cost(planned) <= min(cost(greedy), cost([[length] for length in lengths]))


@given(st.integers(0, 2**32), st.integers(64, 256), st.floats(5.7, 7), st.floats(0.7, 1.3), st.integers(8192, 32768))
@settings(deadline=None, max_examples=amount(30))
def test_padding_is_under_5_percent_of_long_tailed_lengths(
    seed: int, num_rows: int, mean: float, spread: float, budget: int
) -> None:
    drawn = np.random.default_rng(seed).lognormal(mean, spread, num_rows)
    lengths = np.clip(drawn, 16, 4096).astype(np.int64)
    padded = sum(len(cut) * lengths[cut].max() for cut in batching.plan(lengths, budget))
    assert lengths.sum() / padded > 0.95


@pytest.mark.parametrize(("packed", "expected"), [(False, [1, 2, -1, -1, 3, 4, 5]), (True, [3, 4, 5, -1, 1, 2, -1])])
def test_records_of_experts_are_at_the_places_of_their_tokens(packed: bool, expected: list[int]) -> None:
    """Records are of all tokens of a row but the last; packed, the longest row comes first."""
    rows = Rows.from_lists(
        {"prompt_ids": [[7], [7, 7]], "response_ids": [[8, 9], [8, 9]], "routed_experts": [[1, 2], [3, 4, 5]]}
    )
    batch = batching.collate(rows, np.array([0, 1]), packed=packed)
    assert batch.experts_SLW is not None
    assert batch.experts_SLW.flatten().tolist()[: len(expected)] == expected
    assert (batch.experts_SLW.flatten()[len(expected) :] == batching.UNREAD).all()
    assert batch.to(torch.device("meta")).experts_SLW.shape == (7 if packed else 8, 1)


def test_rows_of_one_length_that_fit_stay_together_in_row_order() -> None:
    (cut,) = batching.plan(np.full(64, 76), 8192)
    assert cut.tolist() == list(range(64))


def test_long_rows_are_kept_apart_when_padding_costs_more_than_a_microbatch() -> None:
    lengths = np.array([10] * 30 + [500, 490])
    assert [sorted(cut.tolist()) for cut in batching.plan(lengths, 100_000)] == [[30, 31], list(range(30))]


def test_collate_places_targets_one_after_the_positions_that_predict_them() -> None:
    rows = Rows.from_lists({"prompt_ids": [[5, 6], [7]], "response_ids": [[8], [9, 10, 11]], "advantage": [1.0, -1.0]})
    batch = batching.collate(rows, np.array([0, 1]), ["advantage"])
    assert batch.input_ids_SL.tolist() == [[5, 6, 8, 0], [7, 9, 10, 11]]
    assert batch.positions_N.tolist() == [1, 4, 5, 6]
    assert batch.targets_N.tolist() == [8, 9, 10, 11]
    assert batch.mask_BT.tolist() == [[True, False, False], [True, True, True]]
    assert batch.scatter(torch.tensor([1.0, 2, 3, 4])).tolist() == [[1, 0, 0], [2, 3, 4]]
    assert batch.columns["advantage"].tolist() == [1.0, -1.0]


def test_collate_follows_the_positions_given() -> None:
    rows = Rows.from_lists(
        {"prompt_ids": [[5], [6]], "response_ids": [[7], [8]], "behavior_logprobs": [[-1.0], [-2.0]]}
    )
    batch = batching.collate(rows, np.array([1, 0]), ["behavior_logprobs"])
    assert batch.input_ids_SL.tolist() == [[6, 8], [5, 7]]
    assert batch.columns["behavior_logprobs"].tolist() == [[-2.0], [-1.0]]


def test_an_empty_response_has_no_tokens_and_no_error() -> None:
    rows = Rows.from_lists({"prompt_ids": [[5, 6]], "response_ids": [[]]})
    batch = batching.collate(rows, np.array([0]))
    assert batch.positions_N.numel() == 0
    assert batch.mask_BT.tolist() == [[False]]
    assert [part.tolist() for part in batching.split_rows(batch, torch.zeros(0))] == [[]]


def test_a_column_of_another_length_than_the_response_is_refused_by_name() -> None:
    rows = Rows.from_lists({"prompt_ids": [[5]], "response_ids": [[7, 8]], "behavior_logprobs": [[-1.0]]})
    with pytest.raises(DataError, match=r"behavior_logprobs.*1 values for 2"):
        batching.collate(rows, np.array([0]), ["behavior_logprobs"])


def test_rows_too_long_for_the_model_are_refused_with_the_key_to_change() -> None:
    rows = Rows.from_lists({"prompt_ids": [[5] * 3, [5] * 9], "response_ids": [[7], [7] * 8]})
    with pytest.raises(DataError, match=r"row 1 has a sequence of 17 tokens.*16 positions.*max_tokens"):
        batching.row_shapes(rows, 16)


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(DataError, match="empty prompt"):
        batching.row_shapes(Rows.from_lists({"prompt_ids": [[]], "response_ids": [[7]]}))


@given(st.lists(st.integers(0, 9), max_size=20), st.integers(1, 6))
def test_minibatches_hold_whole_groups_and_each_row_once(group_ids: list[int], count: int) -> None:
    ids = np.array(group_ids, dtype=np.int64)
    parts = batching.split_minibatches(ids, range(10), count)
    assert sorted(np.concatenate(parts).tolist()) == list(range(len(ids)))
    homes = [set(ids[part].tolist()) for part in parts]
    assert sum(len(home) for home in homes) == len(set().union(*homes))


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(1, 30)), max_size=25), st.integers(1, 200))
def test_losses_of_groups_get_them_whole_within_the_budget(rows: list[tuple[int, int]], budget: int) -> None:
    ids = np.array([group for group, _ in rows], dtype=np.int64)
    lengths = np.array([length for _, length in rows], dtype=np.int64)
    cuts = batching.plan_groups(lengths, ids, budget)
    assert sorted(np.concatenate(cuts).tolist() if cuts else []) == list(range(len(rows)))
    homes = [set(ids[cut].tolist()) for cut in cuts]
    assert sum(len(home) for home in homes) == len(set(ids.tolist()))
    assert all(len(cut) * lengths[cut].max() <= budget or len(home) == 1 for cut, home in zip(cuts, homes, strict=True))


@given(st.integers(0, 6), st.integers(0, 6), st.integers(2, 4))
def test_ranks_agree_on_the_number_of_minibatches(num_first: int, num_second: int, count: int) -> None:
    first, second = np.arange(num_first), np.arange(10, 10 + num_second)
    everyone = np.concatenate([first, second])
    assert len(batching.split_minibatches(first, everyone, count)) == len(
        batching.split_minibatches(second, everyone, count)
    )


def test_batches_are_padded_with_dummies_that_have_no_rows(make_rows: Callable[..., Rows]) -> None:
    batches = batching.pad_plan([batching.collate(make_rows(2), np.array([0, 1]))], 3)
    assert [batch.is_dummy for batch in batches] == [False, True, True]
    assert not batches[1].mask_BT.any()


ROWS = st.lists(st.tuples(st.integers(0, 6), st.integers(1, 30)), max_size=25)


@given(ROWS, st.integers(1, 200), st.booleans())
def test_packed_microbatches_have_each_row_once_and_the_budget(
    rows: list[tuple[int, int]], budget: int, whole_groups: bool
) -> None:
    ids = np.array([group for group, _ in rows], dtype=np.int64)
    num_tokens = np.array([tokens for _, tokens in rows], dtype=np.int64)
    cuts = batching.plan_packed(num_tokens, budget, ids if whole_groups else None)
    assert sorted(np.concatenate(cuts).tolist() if cuts else []) == list(range(len(rows)))
    homes = [set(ids[cut].tolist()) for cut in cuts]
    sums = [int(num_tokens[cut].sum()) for cut in cuts]
    alone = [len(home) == 1 if whole_groups else len(cut) == 1 for cut, home in zip(cuts, homes, strict=True)]
    assert all(total <= budget or is_alone for total, is_alone in zip(sums, alone, strict=True))
    assert not whole_groups or sum(len(home) for home in homes) == len(set(ids.tolist()))
    # No two of them would fit into one.
    assert all(first + second > budget for first, second in pairwise(sums))


def test_packed_rows_of_one_length_that_fit_stay_together_in_row_order() -> None:
    (cut,) = batching.plan_packed(np.full(64, 76), 8192)
    assert cut.tolist() == list(range(64))


def test_packing_fills_up_a_budget_that_padding_would_waste() -> None:
    num_tokens = np.array([10] * 30 + [500, 490])
    assert [len(cut) for cut in batching.plan_packed(num_tokens, 1290)] == [32]
    assert [len(cut) for cut in batching.plan(num_tokens, 1290)] == [2, 30]


def test_packed_collation_puts_the_longest_first_and_answers_in_row_order() -> None:
    rows = Rows.from_lists({"prompt_ids": [[5, 6], [7]], "response_ids": [[8], [9, 10, 11]]})
    batch = batching.collate(rows, np.array([0, 1]), packed=True)
    assert batch.input_ids_SL.tolist() == [[7, 9, 10, 11, 5, 6, 8]]
    assert batch.blocks is not None
    assert batch.blocks.lengths == (4, 3)
    assert batch.positions_N.tolist() == [5, 0, 1, 2]
    assert batch.targets_N.tolist() == [8, 9, 10, 11]
    assert batch.mask_BT.tolist() == [[True, False, False], [True, True, True]]
    assert batch.num_tokens == batch.input_ids_SL.numel()


def test_a_place_with_several_targets_meets_the_output_layer_once() -> None:
    rows = Rows.from_lists({"prompt_ids": [[5, 6], [7, 8, 9]], "target_ids": [[1, 2, 3, 4], [5, 6, 7, 8, 9, 10]]})
    rows = rows.with_column("response_ids", [[], []])
    batch = batching.collate(rows, np.arange(2))
    assert batch.scored.tolist() == [[1, 2], [3, 4], [5, 6], [7, 8], [9, 10]]
    assert batch.places.tolist() == batch.positions_N[::2].tolist() == batch.positions_N[1::2].tolist()
    answers = torch.arange(10.0).view(5, 2)
    assert batch.per_target(answers).tolist() == list(range(10))
    assert batch.per_target(torch.arange(5.0)).tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]


def test_rows_with_different_numbers_of_targets_are_scored_one_by_one() -> None:
    rows = Rows.from_lists({"prompt_ids": [[5, 6], [7]], "target_ids": [[1, 2, 3, 4], [5]]})
    rows = rows.with_column("response_ids", [[], []])
    batch = batching.collate(rows, np.arange(2))
    assert batch.scored.tolist() == [1, 2, 3, 4, 5]
    assert batch.places.tolist() == batch.positions_N.tolist()


@given(st.lists(st.lists(st.integers(1, 60), min_size=1, max_size=4), max_size=8), st.integers(1, 4), st.booleans())
def test_each_row_is_computed_by_one_of_the_ranks_that_have_it(
    groups: list[list[int]], num_ranks: int, compares: bool
) -> None:
    def loss(logprobs: object, group_ids: object) -> None: ...

    def plain(logprobs: object) -> None: ...

    lengths = [length for own in groups for length in own]
    ids = np.repeat(np.arange(len(groups)), [len(own) for own in groups])[::-1]
    columns = {"prompt_ids": [[1]] * len(lengths), "response_ids": [[2] * length for length in lengths]}
    rows = Rows.from_lists(columns, ids.tolist())
    shares = [share_of_rank(rows, loss if compares else plain, rank, num_ranks) for rank in range(num_ranks)]
    assert sorted(at for share in shares for at in share) == list(range(len(lengths)))
    if compares:
        owners = [{ids[at] for at in share} for share in shares]
        assert sum(map(len, owners)) == len(groups)

"""Hashes of a step say whether rows have the same bits, whatever their order and their split over ranks."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.store.data.rows import Rows
from penstock.workers.trainer.row_hashes import MODULUS, OF_COLUMN, QUANTITIES, added, hash_of_norms, row_hashes
from penstock.workers.weights.piece import Piece, hash_of_pieces, mixed_sum
from tests.amounts import amount

LENGTHS = st.lists(st.integers(1, 5), min_size=1, max_size=12)


def rows_of(lengths: list[int], seed: int = 0) -> Rows:
    """Rows with a column of each kind of value."""
    random = np.random.default_rng(seed)
    tokens = [random.integers(0, 99, length).tolist() for length in lengths]
    return Rows.from_lists(
        {
            "prompt_ids": [[1, length] for length in lengths],
            "pictures": [[b"png" * length, b""] for length in lengths],
            "response_ids": tokens,
            "behavior_logprobs": [random.normal(size=length).tolist() for length in lengths],
            "reward": random.normal(size=len(lengths)).tolist(),
            "reward_brevity": random.normal(size=len(lengths)).tolist(),
            "advantage": random.normal(size=len(lengths)).tolist(),
            "remark": [f"of {length}" for length in lengths],
            "token_versions": [[3] * length for length in lengths],
        }
    )


@settings(max_examples=amount(60), deadline=None)
@given(LENGTHS, st.randoms(), st.integers(1, 4))
def test_neither_order_nor_split_over_ranks_changes_the_sums(lengths, random, num_ranks):
    rows = rows_of(lengths)
    positions = list(range(len(rows)))
    random.shuffle(positions)
    shares = [positions[rank::num_ranks] for rank in range(num_ranks)]
    parts = [row_hashes(rows.select(share)) for share in shares]
    assert added(parts) == row_hashes(rows)


@pytest.mark.parametrize(
    ("column", "quantity"),
    [
        ("prompt_ids", "prompts"), ("pictures", "prompts"), ("response_ids", "tokens"), ("advantage", "advantages"),
        ("behavior_logprobs", "logprobs"), ("reward", "rewards"), ("reward_brevity", "rewards"),
        ("remark", "advantages"),
    ],
)  # fmt: skip
def test_one_bit_of_a_column_changes_the_hash_of_its_quantity_alone(column, quantity):
    rows = rows_of([3, 1, 2])
    values = list(rows[column])
    first = values[0]
    if isinstance(first, np.ndarray):
        values[0] = np.concatenate([(first[:1].view(np.int32) ^ 1).view(first.dtype), first[1:]])
    elif isinstance(first, list):
        values[0] = [bytes(first[0])[:-1] + b"h", first[1]]
    elif isinstance(first, str):
        values[0] = first + "s"
    else:
        values[0] = (np.array([first]).view(np.int32) ^ 1).view(np.float32)[0]
    values = [[bytes(one) for one in value] if column == "pictures" else value for value in values]
    before, now = row_hashes(rows), row_hashes(rows.with_column(column, values))
    assert {name for name in before if before[name] != now[name]} == {quantity}


def test_values_that_change_rows_and_tokens_that_change_lists_are_seen():
    rows = rows_of([2, 2])
    swapped = rows.with_column("response_ids", rows.arrays("response_ids")[::-1])
    assert row_hashes(swapped)["tokens"] != row_hashes(rows)["tokens"]
    moved = [Rows.from_lists({"response_ids": one}) for one in ([[1, 2], [3]], [[1], [2, 3]])]
    assert row_hashes(moved[0]) != row_hashes(moved[1])


def test_what_depends_on_timing_is_left_out_and_no_rows_add_nothing():
    rows = rows_of([2, 4])
    older = rows.with_column("token_versions", [[1] * 2, [1] * 4])
    assert row_hashes(older) == row_hashes(rows)
    assert set(row_hashes(rows)) == {"prompts", "tokens", "logprobs", "rewards", "advantages"}
    assert set(row_hashes(rows.select([])).values()) == {0}
    assert set(OF_COLUMN.values()) < set(QUANTITIES)


def test_sums_stay_below_the_modulus():
    assert added([{"tokens": MODULUS - 1}, {"tokens": MODULUS - 1}]) == {"tokens": MODULUS - 2}


def test_norms_differ_by_their_last_bit_and_by_their_order():
    norm = 0.1
    after = float(np.nextafter(norm, 1.0))
    assert len({hash_of_norms(norms) for norms in ([norm], [after], [norm, after], [after, norm])}) == 4
    assert hash_of_norms([float("nan")]) == hash_of_norms([float("nan")])


def test_pieces_of_weights_add_up_over_ranks_and_show_one_bit():
    first, second = torch.arange(6.0), torch.arange(4.0)
    pieces = [Piece("a", (2, 3), 0, first), Piece("b", (4,), 0, second)]
    by_rank = [hash_of_pieces(pieces[:1]), hash_of_pieces(pieces[1:])]
    assert sum(by_rank) % MODULUS == hash_of_pieces(pieces[::-1])
    changed = first.clone()
    changed.view(torch.int32)[3] ^= 1
    assert hash_of_pieces([Piece("a", (2, 3), 0, changed), pieces[1]]) != hash_of_pieces(pieces)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.bool])
def test_the_sum_that_devices_make_shows_bits_and_places(dtype):
    values = torch.tensor([0, 1, 1, 0, 1], dtype=dtype)
    seen = {int(mixed_sum(each)) for each in (values, values.flip(0).roll(1), values[:4], torch.zeros_like(values))}
    assert len(seen) == 4
    bits = [
        int(bit)
        for bit in values.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[values.itemsize])
    ]
    expected = sum((bit + 1) * (place * 0x9E3779B97F4A7C1 | 1) for place, bit in enumerate(bits)) % 2**64
    assert int(mixed_sum(values)) % 2**64 == expected

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.algorithms.advantages import CENTRES, SCALES, normalized
from penstock.conf.errors import ConfigError, ShapeError
from tests.amounts import amount

# two prompts, two samples each; group means 1 and 4, all: (0 + 2 + 3 + 5) / 4 = 2.5
REWARD = torch.tensor([0.0, 2.0, 3.0, 5.0])
GROUPS = torch.tensor([7, 7, 3, 3])
BATCHES = st.lists(st.tuples(st.floats(-10, 10, width=32), st.integers(0, 3)), max_size=9)
SPACE = list(itertools.product(CENTRES, SCALES))


@pytest.mark.parametrize(
    ("centre", "expected"),
    [
        ("none", [0.0, 2.0, 3.0, 5.0]),
        ("group", [-1.0, 1.0, -1.0, 1.0]),
        ("batch", [-2.5, -0.5, 0.5, 2.5]),
        ("leave_one_out", [-2.0, 2.0, -2.0, 2.0]),  # each against the other one of its group
    ],
)
def test_the_four_centres(centre, expected):
    assert normalized(REWARD, GROUPS, centre=centre, scale="none").tolist() == expected


@pytest.mark.parametrize(
    ("scale", "expected"),
    [
        ("none", [-1.0, 1.0, -1.0, 1.0]),
        ("group", [-(0.5**0.5), 0.5**0.5] * 2),  # deviation of ±1: sqrt(2 / (2 - 1))
        ("batch", [-(0.75**0.5), 0.75**0.5] * 2),  # deviation of ±1, ±1: sqrt(4 / (4 - 1))
    ],
)
def test_the_three_scales_of_what_is_centred_by_group(scale, expected):
    result = normalized(REWARD, GROUPS, centre="group", scale=scale, eps=0.0)
    torch.testing.assert_close(result, torch.tensor(expected))


def test_without_ids_all_samples_are_one_group():
    assert normalized(REWARD, centre="group", scale="none").tolist() == [-2.5, -0.5, 0.5, 2.5]


def test_a_sample_that_is_alone_where_its_centre_comes_from_gets_zero():
    reward, groups = torch.tensor([3.0, 1.0, 2.0]), torch.tensor([0, 1, 1])
    for centre, scale in itertools.product(("group", "leave_one_out"), SCALES):
        assert normalized(reward, groups, centre=centre, scale=scale)[0] == 0.0
    assert normalized(torch.tensor([3.0]), centre="batch", scale="batch").tolist() == [0.0]


@pytest.mark.parametrize(("centre", "scale"), SPACE)
def test_groups_that_agree_are_not_divided_by_nothing(centre, scale):
    # three times 0.1 is not 0.3 in binary: a mean alone would leave a residue for the deviation to blow up
    result = normalized(torch.full((3,), 0.1), centre=centre, scale=scale, eps=0.0)
    expected = 0.1 if centre == "none" else 0.0
    assert result.tolist() == [pytest.approx(expected, rel=1e-6)] * 3


@pytest.mark.parametrize(("centre", "scale"), SPACE)
@settings(max_examples=amount(25))
@given(batch=BATCHES, random=st.randoms())
def test_neither_the_order_of_samples_nor_the_names_of_groups_matter(centre, scale, batch, random):
    reward, groups = torch.tensor([r for r, _ in batch]), torch.tensor([g for _, g in batch], dtype=torch.long)
    order = list(range(len(batch)))
    random.shuffle(order)
    straight = normalized(reward, groups, centre=centre, scale=scale)
    shuffled = normalized(reward[order], 100 - groups[order], centre=centre, scale=scale)
    assert straight.isfinite().all()
    torch.testing.assert_close(shuffled, straight[order], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("centre", "scale"), SPACE)
@settings(max_examples=amount(25))
@given(batch=BATCHES)
def test_a_group_sees_nothing_of_the_others_unless_a_statistic_is_of_the_batch(centre, scale, batch):
    reward, groups = torch.tensor([r for r, _ in batch]), torch.tensor([g for _, g in batch], dtype=torch.long)
    if "batch" in (centre, scale):
        return
    together = normalized(reward, groups, centre=centre, scale=scale)
    for group in groups.unique():
        alone = normalized(reward[groups == group], centre=centre, scale=scale)
        torch.testing.assert_close(together[groups == group], alone)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int64, torch.bool])
def test_any_real_dtype_gives_float32_of_the_same_values(dtype):
    reward = REWARD.to(dtype)
    result = normalized(reward, GROUPS)
    assert result.dtype == torch.float32
    torch.testing.assert_close(result, normalized(reward.double(), GROUPS))


def test_no_samples_are_no_advantages():
    for centre, scale in SPACE:
        none = torch.tensor([])
        assert normalized(none, none.long(), centre=centre, scale=scale).tolist() == []


def test_bad_input_is_named():
    with pytest.raises(ShapeError, match=r"group_ids is int64 \[4\]; expected \[3\], the shape of reward"):
        normalized(REWARD[:3], GROUPS)
    with pytest.raises(ConfigError, match="centre=grop: unknown; did you mean 'group'"):
        normalized(REWARD, GROUPS, centre="grop")
    with pytest.raises(ConfigError, match="scale=std: unknown"):
        normalized(REWARD, GROUPS, scale="std")
    with pytest.raises(ConfigError, match="eps=-1"):
        normalized(REWARD, GROUPS, eps=-1)

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import kl_div, log_softmax

from penstock.algorithms.builtin.imitation import (
    choose_teacher_columns,
    discounted_sums,
    distill,
    padded_reverse_kl_advantage,
    reverse_kl_advantage,
)
from penstock.algorithms.catalogue import in_environment, with_pictures
from penstock.algorithms.graph.dataflow import Dataflow
from penstock.conf.algorithms import DistillConfig
from penstock.conf.errors import ConfigError, DataflowError, ShapeError

OWN = [torch.tensor([-1.0, -2.0, -3.0]), torch.tensor([-1.0])]
TEACHER = [torch.tensor([-1.5, -1.0, -3.5]), torch.tensor([-1.25])]
SEED, ROWS, WIDTH = st.integers(0, 2**16), st.integers(0, 4), st.integers(0, 9)


def padded(seed, rows, width):
    generator = torch.Generator().manual_seed(seed)
    own, teacher = -3 * torch.rand(2, rows, width, generator=generator)
    return own, teacher, torch.arange(width) < torch.randint(0, width + 1, (rows, 1), generator=generator)


def values(advantages):
    return [advantage.tolist() for advantage in advantages]


def test_without_discount_a_token_answers_for_itself():
    # teacher - own: -1.5 + 1, -1 + 2, -3.5 + 3
    assert values(reverse_kl_advantage(OWN, TEACHER)) == [[-0.5, 1.0, -0.5], [-0.25]]


def test_with_discount_it_answers_for_what_follows_too():
    # from the end: -0.5; 1 + 0.5 · -0.5 = 0.75; -0.5 + 0.5 · 0.75 = -0.125
    assert values(reverse_kl_advantage(OWN, TEACHER, discount=0.5)) == [[-0.125, 0.75, -0.5], [-0.25]]
    # undiscounted: -0.5; 0.5; 0
    assert values(reverse_kl_advantage(OWN, TEACHER, discount=1.0)) == [[0.0, 0.5, -0.5], [-0.25]]


def test_differences_are_clamped_before_they_are_summed():
    # -0.5, 1, -0.5 within ±0.6: -0.5, 0.6, -0.5; summed from the end: -0.5, 0.1, -0.4
    got = reverse_kl_advantage(OWN, TEACHER, discount=1.0, clamp=0.6)
    assert got[0].tolist() == pytest.approx([-0.4, 0.1, -0.5])


@pytest.mark.parametrize("teacher", [-1000.0, -math.inf])
def test_a_token_that_the_teacher_would_never_say_is_bounded(teacher):
    assert values(reverse_kl_advantage([torch.tensor([-1.0])], [torch.tensor([teacher])])) == [[-20.0]]


def test_rows_without_a_token_stay_empty():
    got = reverse_kl_advantage([torch.zeros(0), *OWN], [torch.zeros(0), *TEACHER], discount=0.9)
    assert [len(advantage) for advantage in got] == [0, 3, 1]
    assert reverse_kl_advantage([], []) == []


@given(SEED, WIDTH, st.floats(0, 1))
def test_a_teacher_that_agrees_leaves_nothing_to_learn(seed, width, discount):
    own, _, _ = padded(seed, 1, width)
    assert not reverse_kl_advantage([own[0]], [own[0].clone()], discount=discount)[0].any()


@given(SEED, ROWS, WIDTH, st.floats(0, 1), st.sampled_from([0.0, math.nan, math.inf, -math.inf]))
def test_padded_and_ragged_rows_agree_whatever_lies_under_padding(seed, rows, width, discount, garbage):
    own, teacher, mask = padded(seed, rows, width)
    soiled = [torch.where(mask, tensor, garbage) for tensor in (own, teacher)]
    together = padded_reverse_kl_advantage(*soiled, mask, discount=discount)
    ragged = [[row[valid] for row, valid in zip(tensor, mask, strict=True)] for tensor in (own, teacher)]
    assert not together[~mask].any()
    for row, alone in enumerate(reverse_kl_advantage(*ragged, discount=discount)):
        torch.testing.assert_close(together[row][mask[row]], alone)
        assert alone.dtype == torch.float32


@given(st.lists(st.floats(-10, 10), max_size=40), st.floats(0, 1))
def test_discounted_sums_are_those_of_the_plain_recursion(terms, discount):
    expected, later = [], 0.0
    for term in reversed(terms):
        later = term + discount * later
        expected.insert(0, later)
    got = discounted_sums(torch.tensor(terms, dtype=torch.float64), discount)
    assert got.tolist() == pytest.approx(expected, abs=1e-9)


def two_tokens(seed):
    """Two policies over sequences of two tokens out of three: the first token's, and the second's given the first."""
    generator = torch.Generator().manual_seed(seed)
    first, second = torch.randn(2, 3, generator=generator).double(), torch.randn(2, 3, 3, generator=generator).double()
    logits = [first[0].requires_grad_(), second[0].requires_grad_()]
    return logits, [log_softmax(part, -1) for part in logits], [log_softmax(first[1], -1), log_softmax(second[1], -1)]


def policy_gradient(logits, own, teacher, discount):
    """The exact expectation of Σ_t A_t ∇ log π(y_t) over the student's own sequences."""
    surrogate = torch.zeros((), dtype=torch.float64)
    for a in range(3):
        for b in range(3):
            sampled = torch.stack([own[0][a], own[1][a, b]])
            scored = torch.stack([teacher[0][a], teacher[1][a, b]])
            advantage = reverse_kl_advantage([sampled], [scored], discount=discount, clamp=1e3)[0]
            surrogate = surrogate + sampled.sum().exp().detach() * (advantage * sampled).sum()
    return torch.autograd.grad(surrogate, logits, retain_graph=True)


def kl(own, teacher):
    return kl_div(teacher, own, log_target=True, reduction="none").sum(-1)


@given(SEED)
def test_undiscounted_the_policy_gradient_goes_down_the_reverse_kl_of_sequences(seed):
    # KL(π || π_T) = KL of the first token + E over it of the KL of the second
    logits, own, teacher = two_tokens(seed)
    divergence = kl(own[0], teacher[0]) + (own[0].exp() * kl(own[1], teacher[1])).sum()
    for got, gradient in zip(
        policy_gradient(logits, own, teacher, 1.0), torch.autograd.grad(divergence, logits), strict=True
    ):
        torch.testing.assert_close(got, -gradient, rtol=1e-4, atol=1e-6)


@given(SEED)
def test_without_discount_it_descends_each_tokens_reverse_kl_at_the_student(seed):
    logits, own, teacher = two_tokens(seed)
    divergence = kl(own[0], teacher[0]) + (own[0].exp().detach() * kl(own[1], teacher[1])).sum()
    for got, gradient in zip(
        policy_gradient(logits, own, teacher, 0.0), torch.autograd.grad(divergence, logits), strict=True
    ):
        torch.testing.assert_close(got, -gradient, rtol=1e-4, atol=1e-6)


def test_half_precision_is_subtracted_in_float32_and_nothing_has_a_gradient():
    own = torch.tensor([-0.5], dtype=torch.bfloat16, requires_grad=True)
    advantage = reverse_kl_advantage([own], [torch.tensor([-64.25], dtype=torch.bfloat16)], clamp=100.0)[0]
    assert (advantage.tolist(), advantage.dtype, advantage.requires_grad) == ([-63.5], torch.float32, False)


@pytest.mark.parametrize(
    ("own", "teacher", "settings", "error", "message"),
    [
        (OWN, TEACHER[:1], {}, ShapeError, "teacher_logprobs has 1 rows; expected 2, as many as behavior_logprobs"),
        (
            OWN,
            TEACHER[::-1],
            {},
            ShapeError,
            r"teacher_logprobs is float32 \[1\]; expected \[3\], the shape of behavior_",
        ),
        ([OWN[0][None]], TEACHER[:1], {}, ShapeError, r"behavior_logprobs of row 0 is float32 \[1, 3\]; expected a"),
        ([[-1.0]], TEACHER[:1], {}, ShapeError, r"behavior_logprobs of row 0 is list; expected a tensor \[T\]"),
        (OWN, TEACHER, {"discount": 1.1}, ConfigError, "algorithm.discount=1.1: must lie between 0.0 and 1.0"),
        (OWN, TEACHER, {"discount": -0.1}, ConfigError, "algorithm.discount=-0.1: must lie"),
        (OWN, TEACHER, {"clamp": 0.0}, ConfigError, "algorithm.clamp=0.0: must be a finite number, above 0"),
    ],
)
def test_bad_input_is_named(own, teacher, settings, error, message):
    with pytest.raises(error, match=message):
        reverse_kl_advantage(own, teacher, **settings)


def test_bad_padded_input_is_named():
    with pytest.raises(ShapeError, match=r"logprobs is float32 \[3\]; expected a tensor \[B, T\]"):
        padded_reverse_kl_advantage(OWN[0], TEACHER[0], torch.ones(3))
    with pytest.raises(ShapeError, match=r"mask is float32 \[1, 2\]; expected \[1, 3\], the shape of logprobs"):
        padded_reverse_kl_advantage(OWN[0][None], TEACHER[0][None], torch.ones(1, 2))
    with pytest.raises(ShapeError, match=r"mask is float32 \[1, 3\] with values other than 0 and 1"):
        padded_reverse_kl_advantage(OWN[0][None], TEACHER[0][None], torch.full((1, 3), 0.5))


def test_with_candidates_the_loss_reads_them_and_no_advantage_is_computed():
    flow = distill(DistillConfig(candidates=8, divergence="forward_kl")).check()
    teacher, train = flow.stage("teacher"), flow.stage("train")
    assert [column.name for column in teacher.writes] == ["teacher_logprobs", "candidate_ids", "teacher_candidates"]
    assert teacher.candidates == 8
    assert {"candidate_ids", "teacher_candidates"} <= set(flow.batch_reads())
    assert "candidate_logprobs" not in train.reads
    assert not flow.of_kind("compute")


@pytest.mark.parametrize("candidates", [0, 4])
def test_the_policy_as_it_was_may_judge_with_a_hint(candidates):
    flow = distill(DistillConfig(teacher="reference", hint="{prompt} {answer}", candidates=candidates)).check()
    assert "hinted_ids" in {column.name for column in flow.stage("source").writes}
    assert flow.stage("reference").reads == ("hinted_ids", "response_ids")
    assert "prompt_ids" in flow.stage("train").reads
    assert "hinted_ids" not in flow.batch_reads()


def test_a_hint_is_refused_where_prompts_are_not_rows_of_text():
    flow = distill(DistillConfig(hint="{answer}"))
    with pytest.raises(DataflowError, match=r"algorithm\.hint: environment\.name is set"):
        in_environment(flow)
    with pytest.raises(DataflowError, match=r"algorithm\.hint: rollout\.max_pictures is set"):
        with_pictures(flow)


def test_a_loss_by_candidates_needs_a_stage_that_names_them():
    flow = Dataflow().rollout(samples_per_prompt=2).logprobs("teacher")
    flow.train(loss=distill(DistillConfig(candidates=2)).stage("train").function)
    with pytest.raises(DataflowError, match="'train' reads column 'candidate_ids'"):
        flow.check()


@pytest.mark.parametrize("wrong", [{"divergence": "kl"}, {"beta": 1.5}, {"candidates": -1}])
def test_wrong_settings_are_refused_by_name(wrong):
    with pytest.raises(ConfigError, match=f"algorithm.{next(iter(wrong))}="):
        DistillConfig(**wrong)


TEACHERS = {"math": "one", "code": "other"}


@pytest.mark.parametrize("candidates", [0, 4])
def test_of_several_teachers_each_scores_its_own_rows(candidates):
    flow = distill(DistillConfig(teachers=TEACHERS, candidates=candidates)).check()
    assert flow.stage("one").rows_of == ("data_source", "math")
    assert flow.stage("other").rows_of == ("data_source", "code")
    assert "task" in flow.stage("one").reads
    written = {column.name for column in flow.stage("of_its_teacher").writes}
    assert written == {"teacher_logprobs"} | ({"candidate_ids", "teacher_candidates"} if candidates else set())
    assert not {"one_logprobs", "other_logprobs"} & set(flow.batch_reads())


def test_a_row_gets_the_columns_of_its_own_teacher():
    of_teachers = {"math": ["one_logprobs"], "code": ["other_logprobs"]}
    columns = {"one_logprobs": [torch.ones(2), torch.zeros(3)], "other_logprobs": [torch.zeros(2), torch.ones(3) * 2]}
    task = ['{"data_source": "math"}', '{"data_source": "code"}']
    (found,) = choose_teacher_columns(task, by="data_source", of_teachers=of_teachers, **columns)
    assert values(found) == [[1.0, 1.0], [2.0, 2.0, 2.0]]
    with pytest.raises(DataflowError, match=r"algorithm\.teachers has none for data_source=maths.*math"):
        choose_teacher_columns(['{"data_source": "maths"}'], by="data_source", of_teachers=of_teachers, **columns)
    with pytest.raises(DataflowError, match=r"algorithm\.teacher_by=kind: a task has no such field"):
        choose_teacher_columns(task, by="kind", of_teachers=of_teachers, **columns)

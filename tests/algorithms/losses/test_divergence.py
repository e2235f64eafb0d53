"""The divergence from a teacher, against the formulas over whole distributions."""

import pytest
import torch
from torch import Tensor

from penstock.algorithms.aggregation import BatchTotals
from penstock.algorithms.builtin.imitation import divergence_loss
from penstock.conf.algorithms import DIVERGENCES
from penstock.conf.errors import ConfigError, ShapeError

ROWS, TOKENS, WORDS = 3, 5, 11


def distributions(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities of student and teacher, `[B, T, V]` float64, and a mask."""
    generator = torch.Generator().manual_seed(seed)
    student, teacher = (
        torch.randn(ROWS, TOKENS, WORDS, generator=generator, dtype=torch.float64).mul(2).log_softmax(-1)
        for _ in range(2)
    )
    mask = torch.arange(TOKENS) < torch.tensor([[5], [2], [0]])
    return student.requires_grad_(), teacher, mask


def bucketed(logprobs: Tensor, ids: Tensor) -> Tensor:
    """Probabilities of the tokens and of all others."""
    chosen = logprobs.exp().gather(-1, ids)
    return torch.cat([chosen, 1.0 - chosen.sum(-1, keepdim=True)], dim=-1)


def by_hand(student: Tensor, teacher: Tensor, ids: Tensor, mask: Tensor, divergence: str, beta: float) -> Tensor:
    q, p = bucketed(student, ids), bucketed(teacher, ids)
    m = beta * p + (1 - beta) * q
    values = {
        "forward_kl": (p * (p / q).log()).sum(-1),
        "reverse_kl": (q * (q / p).log()).sum(-1),
        "jensen_shannon": beta * (p * (p / m).log()).sum(-1) + (1 - beta) * (q * (q / m).log()).sum(-1),
    }[divergence]
    return values[mask].sum() / mask.sum()


@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize("count", [1, 4, WORDS - 1])
def test_it_is_the_divergence_of_the_candidates_and_a_bucket(divergence: str, count: int) -> None:
    student, teacher, mask = distributions()
    ids = teacher.topk(count, dim=-1).indices
    expected = by_hand(student, teacher, ids, mask, divergence, 0.3)
    found, metrics = divergence_loss(
        student.gather(-1, ids), mask, BatchTotals.of(mask), teacher.gather(-1, ids), divergence=divergence, beta=0.3
    )
    assert torch.allclose(found, expected, rtol=1e-9)
    ours, theirs = (torch.autograd.grad(value, student, retain_graph=True)[0] for value in (found, expected))
    assert torch.allclose(ours, theirs, atol=1e-10)
    assert metrics["loss"] == found.detach()
    assert metrics["teacher_mass"] == pytest.approx(float(teacher.gather(-1, ids).exp().sum(-1)[mask].mean()))


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_with_all_words_it_is_that_of_the_whole_distributions(divergence: str) -> None:
    student, teacher, mask = distributions()
    found, _ = divergence_loss(student.float(), mask, BatchTotals.of(mask), teacher.float(), divergence=divergence)
    p, q = teacher.exp(), student.exp()
    m = (p + q) / 2
    values = {"forward_kl": p * (p / q).log(), "reverse_kl": q * (q / p).log(),
              "jensen_shannon": (p * (p / m).log() + q * (q / m).log()) / 2}[divergence]  # fmt: skip
    assert float(found.detach()) == pytest.approx(float(values.sum(-1)[mask].mean().detach()), abs=1e-5)
    (gradient,) = torch.autograd.grad(found, student)
    assert gradient.isfinite().all()


def test_at_its_ends_the_mixture_is_one_of_both() -> None:
    student, teacher, mask = distributions()
    for beta in (0.0, 1.0):
        found, _ = divergence_loss(student, mask, BatchTotals.of(mask), teacher, divergence="jensen_shannon", beta=beta)
        assert float(found.detach()) == pytest.approx(0.0, abs=1e-9)
        assert torch.autograd.grad(found, student)[0].isfinite().all()


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_what_lies_under_padding_reaches_neither_value_nor_gradient(divergence: str) -> None:
    student, teacher, mask = distributions()
    spoiled = torch.where(mask.unsqueeze(-1), student.detach(), torch.nan).requires_grad_()
    bad_teacher = torch.where(mask.unsqueeze(-1), teacher, torch.inf)
    values = []
    for one, other in ((student, teacher), (spoiled, bad_teacher)):
        found, _ = divergence_loss(one, mask, BatchTotals.of(mask), other, divergence=divergence)
        values.append((found, torch.autograd.grad(found, one)[0]))
    assert values[0][0] == values[1][0]
    assert torch.equal(values[0][1], values[1][1])


def test_micro_batches_add_up_to_the_batch() -> None:
    student, teacher, mask = distributions()
    totals = BatchTotals.of(mask)
    whole, _ = divergence_loss(student, mask, totals, teacher)
    parts = [divergence_loss(student[row : row + 1], mask[row : row + 1], totals, teacher[row : row + 1])[0]
             for row in range(ROWS)]  # fmt: skip
    assert torch.allclose(sum(parts, torch.zeros(())), whole)


def test_wrong_settings_and_shapes_are_named() -> None:
    student, teacher, mask = distributions()
    totals = BatchTotals.of(mask)
    with pytest.raises(ConfigError, match=r"algorithm\.divergence=kl"):
        divergence_loss(student, mask, totals, teacher, divergence="kl")
    with pytest.raises(ConfigError, match=r"algorithm\.beta=2"):
        divergence_loss(student, mask, totals, teacher, beta=2.0)
    with pytest.raises(ShapeError, match="teacher_candidates"):
        divergence_loss(student, mask, totals, teacher[..., :3])
    with pytest.raises(ShapeError, match=r"mask is bool \[3, 4\]"):
        divergence_loss(student, mask[:, :4], totals, teacher)

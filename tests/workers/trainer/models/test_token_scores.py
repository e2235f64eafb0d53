"""Against whole logits, in values and gradients, whatever the tiles."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.workers.trainer.models.token_scores import (
    BYTES_PER_LOGIT,
    LogitChange,
    OutputLayer,
    likeliest_tokens,
    tile_shape,
    token_scores,
)

TOKENS, HIDDEN, VOCABULARY = 13, 8, 97
BUDGETS = (1, 40 * BYTES_PER_LOGIT, 300 * BYTES_PER_LOGIT, 2**20)
"""One logit at a time, tiles that divide nothing, and whole logits."""


def problem(seed: int = 0, spread: float = 1.0, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states and weight with gradients, targets with repetitions and both ends of the vocabulary."""
    generator = torch.Generator().manual_seed(seed)
    hidden = (torch.randn(TOKENS, HIDDEN, generator=generator) * spread).to(dtype)
    weight = torch.randn(VOCABULARY, HIDDEN, generator=generator).to(dtype)
    targets = torch.randint(0, VOCABULARY, (TOKENS,), generator=generator)
    targets[:4] = torch.tensor([0, VOCABULARY - 1, 5, 5])
    return hidden.requires_grad_(), weight.requires_grad_(), targets


def plain(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, temperature: float | Tensor,
    cap: float | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    logits = nn.functional.linear(hidden, weight, bias).float()
    logits = (logits if cap is None else cap * torch.tanh(logits / cap)) / temperature
    logprobs = torch.log_softmax(logits, dim=-1)
    return logprobs.gather(1, targets[:, None]).squeeze(1), -(logprobs.exp() * logprobs).sum(-1)


def gradients(value: Tensor, *inputs: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(value, inputs))


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("entropy", ["none", "value", "gradient"])
def test_scores_equal_those_of_whole_logits(budget: int, temperature: float, with_bias: bool, entropy: str) -> None:
    hidden, weight, targets = problem()
    bias = torch.linspace(-1, 1, VOCABULARY, requires_grad=True) if with_bias else None
    inputs = [hidden, weight, *([bias] if bias is not None else [])]
    expected, expected_entropy = plain(hidden, weight, bias, targets, temperature)
    logprobs, entropies = token_scores(
        hidden, weight, bias, targets, temperature=temperature, entropy=entropy, budget_bytes=budget
    )
    upstream = torch.linspace(-1, 2, TOKENS)
    value, expected_value = (logprobs * upstream).sum(), (expected * upstream).sum()
    torch.testing.assert_close(logprobs, expected, atol=1e-5, rtol=0)
    if entropy == "none":
        assert entropies is None
    else:
        assert entropies is not None
        torch.testing.assert_close(entropies, expected_entropy, atol=1e-5, rtol=0)
        assert entropies.requires_grad == (entropy == "gradient")
    if entropy == "gradient":
        assert entropies is not None
        value = value + (entropies * upstream.flip(0)).sum()
        expected_value = expected_value + (expected_entropy * upstream.flip(0)).sum()
    for gradient, wanted in zip(gradients(value, *inputs), gradients(expected_value, *inputs), strict=True):
        torch.testing.assert_close(gradient, wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("temperature", [0.7, torch.linspace(0.5, 2.0, TOKENS)], ids=["one", "each"])
@pytest.mark.parametrize("with_bias", [False, True])
def test_capped_logits_have_the_scores_and_gradients_of_whole_ones(
    budget: int, temperature: float | Tensor, with_bias: bool
) -> None:
    hidden, weight, targets = problem()
    bias = torch.linspace(-1, 1, VOCABULARY, requires_grad=True) if with_bias else None
    inputs = [hidden, weight, *([bias] if bias is not None else [])]
    column = temperature[:, None] if isinstance(temperature, Tensor) else temperature
    expected = plain(hidden, weight, bias, targets, column, cap=2.0)
    logprobs, entropies = token_scores(
        hidden, weight, bias, targets, temperature=temperature, entropy="gradient", budget_bytes=budget, cap=2.0
    )
    assert entropies is not None
    torch.testing.assert_close(logprobs, expected[0], atol=1e-5, rtol=0)
    torch.testing.assert_close(entropies, expected[1], atol=1e-5, rtol=0)
    upstream = torch.linspace(-1, 2, TOKENS)
    found = gradients(((logprobs - entropies) * upstream).sum(), *inputs)
    for gradient, wanted in zip(found, gradients(((expected[0] - expected[1]) * upstream).sum(), *inputs), strict=True):
        torch.testing.assert_close(gradient, wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("budget", BUDGETS)
def test_an_output_layer_scales_its_product_then_caps_it(budget: int) -> None:
    layer = OutputLayer.of(nn.Linear(1, 2, bias=False))
    layer.change = LogitChange(scale=0.5, cap=1.0)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[4.0], [0.0]]))
        logprobs, _ = layer(torch.ones(1, 1), torch.tensor([1]), budget_bytes=budget)
    # tanh(0.5 * 4) = 0.9640, and -log(1 + exp(0.9640)) = -1.2871
    torch.testing.assert_close(logprobs, torch.tensor([-1.2871]), atol=1e-4, rtol=0)


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("with_bias", [False, True])
def test_each_token_may_have_a_temperature_of_its_own(budget: int, with_bias: bool) -> None:
    hidden, weight, targets = problem()
    bias = torch.linspace(-1, 1, VOCABULARY, requires_grad=True) if with_bias else None
    inputs = [hidden, weight, *([bias] if bias is not None else [])]
    temperatures = torch.linspace(0.5, 2.0, TOKENS)
    expected = plain(hidden, weight, bias, targets, temperatures[:, None])
    logprobs, entropies = token_scores(
        hidden, weight, bias, targets, temperature=temperatures, entropy="gradient", budget_bytes=budget
    )
    assert entropies is not None
    torch.testing.assert_close(logprobs, expected[0], atol=1e-5, rtol=0)
    torch.testing.assert_close(entropies, expected[1], atol=1e-5, rtol=0)
    upstream = torch.linspace(-1, 2, TOKENS)
    found = gradients(((logprobs - entropies) * upstream).sum(), *inputs)
    for gradient, wanted in zip(found, gradients(((expected[0] - expected[1]) * upstream).sum(), *inputs), strict=True):
        torch.testing.assert_close(gradient, wanted, atol=1e-5, rtol=1e-5)


@given(st.integers(0, 1000), st.integers(1, 2000), st.floats(0.1, 100), st.floats(0.3, 3))
def test_neither_tiles_nor_the_size_of_logits_change_the_scores(
    seed: int, num_logits: int, spread: float, temperature: float
) -> None:
    hidden, weight, targets = problem(seed, spread)
    hidden, weight = hidden.double(), weight.double()
    expected, expected_entropy = plain(hidden, weight, None, targets, temperature)
    with torch.no_grad():
        logprobs, entropies = token_scores(
            hidden.float(), weight.float(), None, targets,
            temperature=temperature, entropy="value", budget_bytes=num_logits * BYTES_PER_LOGIT,
        )  # fmt: skip
    assert entropies is not None
    rounding = (
        8 * torch.finfo(torch.float32).eps * float((hidden @ weight.T).detach().abs().max()) / temperature
    )  # of a logit
    torch.testing.assert_close(logprobs, expected.float(), atol=1e-5 + rounding, rtol=1e-5)
    torch.testing.assert_close(entropies, expected_entropy.float(), atol=1e-3 + 8 * rounding, rtol=1e-4)


@pytest.mark.parametrize("budget", BUDGETS)
def test_bfloat16_rounds_logits_as_the_model_does_and_sums_in_float32(budget: int) -> None:
    hidden, weight, targets = problem(dtype=torch.bfloat16)
    expected, _ = plain(hidden, weight, None, targets, 0.7)
    logprobs, _ = token_scores(hidden, weight, None, targets, temperature=0.7, budget_bytes=budget)
    torch.testing.assert_close(logprobs, expected, atol=1e-5, rtol=0)
    exact = problem()
    with torch.no_grad():
        for ours, rounded in zip(exact, (hidden, weight), strict=False):
            ours.copy_(rounded)
    wanted = gradients(plain(exact[0], exact[1], None, targets, 0.7)[0].sum(), *exact[:2])
    found = gradients(logprobs.sum(), hidden, weight)
    for gradient, right in zip(found, wanted, strict=True):
        assert gradient.dtype == torch.bfloat16
        torch.testing.assert_close(gradient.float(), right, atol=0.06, rtol=0.02)


def test_a_frozen_weight_gets_no_gradient_and_hidden_states_theirs() -> None:
    hidden, weight, targets = problem()
    weight.requires_grad_(False)
    logprobs, _ = token_scores(hidden, weight, None, targets)
    logprobs.sum().backward()
    assert weight.grad is None
    torch.testing.assert_close(hidden.grad, *gradients(plain(hidden, weight, None, targets, 1.0)[0].sum(), hidden))


def test_a_batch_without_response_tokens_has_no_scores() -> None:
    hidden, weight, targets = problem()
    logprobs, entropies = token_scores(hidden[:0], weight, None, targets[:0], entropy="value")
    assert logprobs.shape == (0,)
    assert entropies is not None
    assert entropies.shape == (0,)
    logprobs.sum().backward()
    assert not weight.grad.any()


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that any operation makes."""

    elements = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self.elements = max(self.elements, result.numel())
        return result


@pytest.mark.parametrize("entropy", ["value", "gradient"])
def test_nothing_larger_than_a_tile_or_the_weight_is_ever_made(entropy: str) -> None:
    hidden, weight, targets = problem()
    with Largest() as largest:
        logprobs, entropies = token_scores(hidden, weight, None, targets, entropy=entropy, budget_bytes=1000)
        (logprobs + entropies).sum().backward()
    assert largest.elements == weight.numel() < TOKENS * VOCABULARY


@given(st.integers(1, 3000), st.integers(1, 200_000), st.integers(1, 2**30), st.booleans())
def test_a_tile_keeps_the_budget(num_tokens: int, vocabulary: int, budget: int, is_cpu: bool) -> None:
    rows, words = tile_shape(num_tokens, vocabulary, budget, is_cpu=is_cpu)
    assert 1 <= rows <= num_tokens
    assert 1 <= words <= vocabulary
    assert rows * words * BYTES_PER_LOGIT <= max(budget, BYTES_PER_LOGIT)


def test_tiles_of_few_tokens_are_long_and_of_many_square() -> None:
    assert tile_shape(8192, 150_000, 2**26, is_cpu=False) == (2896, 2896)
    assert tile_shape(100, 150_000, 2**26, is_cpu=False) == (100, 83886)
    assert tile_shape(8192, 150_000, 2**26, is_cpu=True) == (1024, 1024)
    assert tile_shape(8192, 100, 2**26, is_cpu=False) == (8192, 100)
    assert tile_shape(0, 100, 2**26, is_cpu=False) == (1, 100)


def test_an_output_layer_has_the_linear_ones_parameters_and_gives_its_logits() -> None:
    linear = nn.Linear(HIDDEN, VOCABULARY)
    layer = OutputLayer.of(linear)
    hidden, _, targets = problem()
    assert layer.weight is linear.weight
    assert layer.bias is linear.bias
    assert torch.equal(layer(hidden), linear(hidden))
    torch.testing.assert_close(
        layer(hidden, targets, temperature=0.7)[0], plain(hidden, linear.weight, linear.bias, targets, 0.7)[0]
    )


@pytest.mark.parametrize("budget_bytes", BUDGETS)
@pytest.mark.parametrize("with_bias", [False, True])
def test_banned_tokens_have_no_probability_and_no_gradient(budget_bytes: int, with_bias: bool) -> None:
    """As if their rows of the weight were not there, in entropies and in every gradient, too."""
    hidden, weight, targets = problem()
    banned = [1, 50, VOCABULARY - 2]
    left = [word for word in range(VOCABULARY) if word not in banned]
    layer = OutputLayer.of(nn.Linear(HIDDEN, VOCABULARY, bias=with_bias))
    with torch.no_grad():
        layer.weight.copy_(weight)
    layer.ban(banned)
    targets = torch.tensor(left)[targets % len(left)]
    logprobs, entropy = layer(hidden, targets, temperature=0.7, entropy="gradient", budget_bytes=budget_bytes)
    bias = None if layer.bias is None else layer.bias.detach()[left]
    expected, expected_entropy = plain(
        hidden, weight[left], bias, torch.tensor([left.index(word) for word in targets.tolist()]), 0.7
    )
    torch.testing.assert_close(logprobs, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(entropy, expected_entropy, atol=1e-5, rtol=1e-5)
    (of_weight,) = torch.autograd.grad((logprobs + entropy).sum(), [layer.weight], retain_graph=True)
    (of_plain,) = torch.autograd.grad((expected + expected_entropy).sum(), [weight], retain_graph=True)
    torch.testing.assert_close(of_weight[left], of_plain[left], atol=1e-4, rtol=1e-4)
    assert not of_weight[banned].any()
    assert layer(hidden).softmax(-1)[:, banned].eq(0).all(), "and none in the product"


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("entropy", ["none", "gradient"])
def test_several_targets_of_a_token_are_scored_as_each_alone(budget: int, entropy: str) -> None:
    """Values bit for bit; the gradients are the sums of theirs."""
    hidden, weight, targets = problem()
    temperatures = torch.linspace(0.5, 2.0, TOKENS)
    candidates = torch.stack([targets, targets.flip(0), targets, (targets + 31) % VOCABULARY], dim=1)
    found, entropies = token_scores(
        hidden, weight, None, candidates, temperature=temperatures, entropy=entropy, budget_bytes=budget
    )
    alone = [
        token_scores(hidden, weight, None, one, temperature=temperatures, entropy=entropy, budget_bytes=budget)
        for one in candidates.unbind(1)
    ]
    assert torch.equal(found, torch.stack([logprobs for logprobs, _ in alone], dim=1))
    upstream = torch.linspace(-1, 2, candidates.numel()).view(candidates.shape)
    expected = sum((logprobs * upstream[:, number]).sum() for number, (logprobs, _) in enumerate(alone))
    value = (found * upstream).sum()
    if entropies is not None:
        value, expected = value + entropies.sum(), expected + alone[0][1].sum()
    for one, other in zip(gradients(value, hidden, weight), gradients(expected, hidden, weight), strict=True):
        assert torch.allclose(one, other, atol=1e-5)


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("count", [1, 7, VOCABULARY])
def test_the_likeliest_tokens_are_those_of_whole_logits(budget: int, count: int) -> None:
    hidden, weight, targets = problem()
    logits = nn.functional.linear(hidden, weight).float() / 0.7
    expected, ids = torch.log_softmax(logits, dim=-1).topk(count, dim=-1)
    logprobs, found = likeliest_tokens(hidden, weight, None, targets, count, temperature=0.7, budget_bytes=budget)
    assert torch.equal(found, ids)
    assert torch.allclose(logprobs[:, 1:], expected, atol=1e-5)
    assert torch.allclose(logprobs[:, 0], token_scores(hidden, weight, None, targets, temperature=0.7)[0], atol=1e-5)
    assert not logprobs.requires_grad

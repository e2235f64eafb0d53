"""Linear layers by oneDNN: the same numbers as torch's own, the same parameters."""

import pytest
import torch
from torch import nn

from penstock.workers.trainer.models import linear
from penstock.workers.trainer.models.linear import OneDnnLinear, use_fast_linears


@pytest.mark.parametrize("shape", [(7, 24), (3, 5, 24), (1, 24)])
@pytest.mark.parametrize("bias", [True, False])
def test_products_and_gradients_are_those_of_torch(shape: tuple[int, ...], bias: bool) -> None:
    torch.manual_seed(0)
    plain = nn.Linear(24, 40, bias=bias)
    fast = OneDnnLinear.of(plain)
    found = []
    for layer in (plain, fast):
        given = torch.linspace(-1, 1, torch.Size(shape).numel()).reshape(shape).requires_grad_()
        layer.zero_grad()
        product = layer(given)
        product.backward(torch.linspace(-2, 1, product.numel()).reshape(product.shape))
        found.append([product.detach(), given.grad, *(parameter.grad.clone() for parameter in layer.parameters())])
    for expected, computed in zip(*found, strict=True):
        torch.testing.assert_close(computed, expected, rtol=1e-5, atol=1e-5)


def test_a_frozen_weight_has_no_gradient_and_passes_on_that_of_its_input() -> None:
    layer = OneDnnLinear.of(nn.Linear(4, 3).requires_grad_(False))
    given = torch.ones(2, 4, requires_grad=True)
    layer(given).sum().backward()
    assert layer.weight.grad is None
    torch.testing.assert_close(given.grad, layer.weight.sum(0).expand(2, 4))


@pytest.mark.parametrize("given", [torch.zeros(0, 4), torch.zeros(2, 4, dtype=torch.bfloat16)])
def test_what_is_no_float32_matrix_is_multiplied_as_ever(given: torch.Tensor) -> None:
    layer = OneDnnLinear.of(nn.Linear(4, 3)).to(given.dtype)
    assert layer(given).shape == (len(given), 3)
    assert layer(given).dtype == given.dtype


def test_a_models_own_linear_layers_are_replaced_with_their_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    class Head(nn.Linear):
        """A linear layer of a class of its own."""

    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.GELU(), nn.Linear(4, 4, bias=False)), Head(4, 2))
    before = dict(model.named_parameters())
    monkeypatch.setattr(linear, "mkl_is_slow", lambda: False)
    use_fast_linears(model)
    assert type(model[0]) is nn.Linear
    monkeypatch.setattr(linear, "mkl_is_slow", lambda: True)
    use_fast_linears(model)
    assert [type(layer) for layer in (model[0], model[1][1], model[2])] == [OneDnnLinear, OneDnnLinear, Head]
    after = dict(model.named_parameters())
    assert after.keys() == before.keys()
    assert all(after[name] is before[name] for name in before)


@pytest.mark.parametrize(
    ("maker", "capability", "slow"),
    [
        ("AuthenticAMD", "AVX512", True),
        ("GenuineIntel", "AVX512", False),
        ("AuthenticAMD", "AVX2", False),
        ("", "AVX512", False),
    ],
)
def test_mkl_is_left_where_it_knows_the_cpus_instructions(
    monkeypatch: pytest.MonkeyPatch, maker: str, capability: str, slow: bool
) -> None:
    linear.mkl_is_slow.cache_clear()
    monkeypatch.setattr(linear, "cpu_entry", {"vendor_id": maker}.get)
    for backend in (torch.backends.mkl, torch.backends.mkldnn):
        monkeypatch.setattr(backend, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    try:
        assert linear.mkl_is_slow() is slow
    finally:
        linear.mkl_is_slow.cache_clear()

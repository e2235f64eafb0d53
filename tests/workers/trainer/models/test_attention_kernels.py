"""Kernels that only GPUs have, with stand-ins that compute the same on a CPU: how they are called, and what happens
where one fails."""

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import varlen as torchs

from penstock.conf.errors import ConfigError
from penstock.conf.trainer import TrainerConfig
from penstock.workers.trainer.models import attention_kernels, packed_attention
from penstock.workers.trainer.models.attention_kernels import difference, reason_against_packed, try_packed
from penstock.workers.trainer.models.packed_attention import Kernels, TreeAttention, find_kernels
from penstock.workers.trainer.ranks import Ranks
from penstock.workers.trainer.update.token_layout import Blocks
from tests.workers.trainer.models.test_packed_attention import (
    LENGTHS,
    MODELS,
    TOLERANCE,
    answers,
    gradients,
    make,
    rows,
    varlen,
)

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
BFLOAT16 = torch.bfloat16
SMALL = 64


def stand_in(
    query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor | None, max_q: int, max_k: int, *,
    return_aux: Any = None, scale: float | None = None, window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False, **more: Any,
) -> Tensor:  # fmt: skip
    """What `torch.nn.attention.varlen.varlen_attn` computes, on a CPU; it refuses what that refuses."""
    assert not more
    assert cu_seq_k is not None
    assert cu_seq_q[-1] == len(query)
    assert window_size[1] == 0
    if query.shape[1] != key.shape[1] and not enable_gqa:
        raise ValueError("Expect query and key/value to have the same number of heads")
    return varlen(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, 0.0, scale, causal=True, window_size=window_size)


@pytest.fixture
def working(monkeypatch: pytest.MonkeyPatch) -> dict[Any, bool]:
    """What trials have shown, by kind of device, dtype and width."""
    shown: dict[Any, bool] = {}
    monkeypatch.setattr(attention_kernels, "WORKING", shown)
    return shown


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tokens of each call of the kernel, which is stood in for."""
    found: list[int] = []

    def noted(query: Tensor, *arguments: Any, **options: Any) -> Tensor:
        found.append(len(query))
        return stand_in(query, *arguments, **options)

    monkeypatch.setattr(torchs, "varlen_attn", noted)
    return found


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    joined = Ranks.join(TrainerConfig())
    yield joined
    joined.leave()


@pytest.fixture
def on_cuda(monkeypatch: pytest.MonkeyPatch, ranks: Ranks) -> Ranks:
    """A rank that claims to be on a GPU; tensors that trials put there stay on the CPU."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    trial, flex = attention_kernels.reason_against_packed, packed_attention.reason_against_flex
    monkeypatch.setattr(attention_kernels, "reason_against_packed", lambda device, *rest: trial(CPU, *rest))
    monkeypatch.setattr(packed_attention, "reason_against_flex", lambda device, *rest: flex(CPU, *rest))
    return replace(ranks, device=CUDA)


def test_the_stand_in_takes_what_torchs_function_takes() -> None:
    import inspect

    assert {*inspect.signature(stand_in).parameters} - {"more"} <= {*inspect.signature(torchs.varlen_attn).parameters}


@pytest.mark.parametrize("kind", ["Qwen2", "Qwen3", "Mistral", "Gemma3", "GPTNeoX", "Mixtral"])
def test_packed_rows_by_torchs_kernel_are_those_of_rows_alone(
    kind: str, working: dict[Any, bool], calls: list[int]
) -> None:
    lm, tolerance = make(kind, MODELS[kind]), TOLERANCE.get(kind, 1e-9)
    alone = [torch.cat(parts) for parts in zip(*(answers(lm, ids) for ids in rows()), strict=True)]
    expected = gradients(lm, *alone)
    working["cpu", torch.float64, 4] = True
    assert packed_attention.choose(lm, "auto", has_kernel=True)
    packed = answers(lm, torch.cat(rows(), dim=1), Blocks.of(LENGTHS))
    assert calls == [sum(LENGTHS)] * lm.config.num_hidden_layers
    for ours, theirs in zip(packed, alone, strict=True):
        torch.testing.assert_close(ours, theirs, atol=tolerance, rtol=0)
    found = gradients(lm, *packed)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, atol=tolerance, rtol=0, msg=name)


def test_padding_behind_packed_rows_is_a_row_of_its_own(working: dict[Any, bool], calls: list[int]) -> None:
    lm = make("Qwen2", {})
    packed_attention.choose(lm, "always")
    ids = torch.cat([*rows(), torch.zeros(1, 11, dtype=torch.int64)], dim=1)
    blocks = Blocks.of(LENGTHS)
    padded = replace(blocks, position_ids_1T=torch.nn.functional.pad(blocks.position_ids_1T, (0, 11)))
    expected = answers(lm, ids, padded)
    working["cpu", torch.float64, 4] = True
    for ours, theirs in zip(answers(lm, ids, padded), expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-9, rtol=0)
    assert calls == [sum(LENGTHS) + 11] * 2


def test_what_was_not_tried_is_computed_by_sdpa(working: dict[Any, bool], calls: list[int]) -> None:
    lm = make("Qwen2", {})
    assert packed_attention.choose(lm, "auto", has_kernel=True)
    working["cpu", torch.float64, 8] = working["cpu", torch.bfloat16, 4] = True
    answers(lm, torch.cat(rows(), dim=1), Blocks.of(LENGTHS))
    assert not calls


@pytest.mark.parametrize(
    ("dtype", "width", "capability", "works"),
    [
        (BFLOAT16, 64, (9, 0), True),
        (torch.float16, 256, (8, 0), True),
        (torch.float32, 64, (9, 0), False),
        (BFLOAT16, 68, (9, 0), False),
        (BFLOAT16, 264, (9, 0), False),
        (BFLOAT16, 64, (7, 5), False),
    ],
)
def test_the_kernel_is_tried_once_where_it_can_work(
    monkeypatch: pytest.MonkeyPatch, working: dict[Any, bool], dtype: torch.dtype, width: int,
    capability: tuple[int, int], works: bool,
) -> None:  # fmt: skip
    tried = []
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(attention_kernels, "reason_against_packed", lambda *key: tried.append(key))
    assert [try_packed(CUDA, dtype, width) for _ in range(2)] == [works] * 2
    assert len(tried) == works
    assert not try_packed(CPU, dtype, width)


def test_the_trial_compares_results_and_gradients_with_and_without_a_window(calls: list[int]) -> None:
    assert reason_against_packed(CPU, BFLOAT16, SMALL) is None
    assert len(calls) == 2


@pytest.mark.parametrize("wrong", ["no window", "values", "gradients", "raises"])
def test_a_kernel_that_computes_something_else_is_not_used_and_said(
    monkeypatch: pytest.MonkeyPatch, working: dict[Any, bool], on_cuda: Ranks, caplog: pytest.LogCaptureFixture,
    wrong: str,
) -> None:  # fmt: skip
    def kernel(query: Tensor, key: Tensor, value: Tensor, *rest: Any, **options: Any) -> Tensor:
        if wrong == "raises":
            raise RuntimeError("no kernel image is available")
        if wrong == "no window":
            options["window_size"] = (-1, 0)
        if wrong == "gradients":
            key = key.detach() * 0.5 + key * 0.5
        output = stand_in(query, key, value, *rest, **options)
        return output * 1.1 if wrong == "values" else output

    monkeypatch.setattr(torchs, "varlen_attn", kernel)
    with caplog.at_level(logging.WARNING):
        assert not try_packed(CUDA, BFLOAT16, SMALL)
    assert "varlen is not used" in caplog.text
    assert ("no kernel image" if wrong == "raises" else "away from sdpa") in caplog.text


Way = Callable[..., Tensor]


@pytest.mark.parametrize(
    ("flex", "said"),
    [
        (lambda self, *tensors, **options: self.by_blocks(*tensors, **options), None),
        (lambda self, *tensors, **options: 1.1 * self.by_blocks(*tensors, **options), "away from sdpa"),
        (lambda self, *tensors, **options: 1 / 0, "ZeroDivisionError"),
    ],
)
def test_trees_are_rows_alone_where_flex_attention_fails(
    monkeypatch: pytest.MonkeyPatch, working: dict[Any, bool], on_cuda: Ranks, caplog: pytest.LogCaptureFixture,
    calls: list[int], flex: Way, said: str | None,
) -> None:  # fmt: skip
    lm = make("Qwen2", {})
    monkeypatch.setattr(TreeAttention, "by_flex", flex)
    with caplog.at_level(logging.WARNING):
        found = find_kernels(lm, TrainerConfig(dtype="bfloat16", packing="never"), on_cuda)
    assert found == Kernels(packed=False, trees=said is None)
    assert not calls
    sharing = packed_attention.choose_trees(lm, "auto", is_compiled=False, has_kernel=found.trees)
    assert sharing == ("auto" if said is None else "never")
    if said is not None:
        assert said in caplog.text
        assert "trainer.share_prefixes=auto is never" in caplog.text
        with pytest.raises(ConfigError, match=r"share_prefixes=always: FlexAttention, .* does not work here"):
            packed_attention.choose_trees(lm, "always", is_compiled=False, has_kernel=found.trees)


def test_kernels_count_that_work_on_all_ranks(
    monkeypatch: pytest.MonkeyPatch, working: dict[Any, bool], on_cuda: Ranks, calls: list[int]
) -> None:
    lm = make("Qwen2", {"head_dim": 8})
    config = TrainerConfig(dtype="bfloat16", share_prefixes="never")
    assert find_kernels(lm, config, on_cuda) == Kernels(packed=True)
    other = Kernels(packed=False, trees=False)
    monkeypatch.setattr(Ranks, "gather_ranks", lambda self, value: [value, other])
    assert find_kernels(lm, config, on_cuda) == other


def test_nothing_is_tried_on_a_cpu(monkeypatch: pytest.MonkeyPatch, ranks: Ranks) -> None:
    monkeypatch.setattr(attention_kernels, "difference", lambda *_: pytest.fail("tried"))
    assert find_kernels(make("Qwen2", {}), TrainerConfig(dtype="bfloat16"), ranks) == Kernels(packed=False)


def test_kernels_that_are_the_same_do_not_differ() -> None:
    shapes = [(1, 2, 5, 8)] * 3
    assert difference(lambda q, k, v: q + k * v, lambda q, k, v: k * v + q, shapes, CPU, BFLOAT16) is None

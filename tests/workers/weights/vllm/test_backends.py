"""Modules of an engine that are loaded layer by layer, and those that are loaded in place."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

pytestmark = [pytest.mark.vllm]
backends = pytest.importorskip("penstock.workers.weights.vllm.backends", reason="vLLM is not installed")


def model() -> nn.ModuleDict:
    layers = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    return nn.ModuleDict(
        {"model": nn.ModuleDict({"embed": nn.Embedding(3, 2), "layers": layers}), "head": nn.Linear(2, 3)}
    )


def test_a_model_of_which_nothing_is_left_out_is_one_part() -> None:
    whole = model()
    assert list(backends.parts_without(whole, [])) == [whole]


def test_parts_have_every_layer_but_those_left_out_once() -> None:
    whole = model()
    left_out = [whole["model"]["embed"], whole["head"]]
    parts = list(backends.parts_without(whole, left_out))
    assert parts == [whole["model"]["layers"]]


def test_an_embedding_that_nothing_is_packed_for_is_loaded_like_any_layer() -> None:
    assert backends.packed_embeddings(model()) == []


def test_a_version_counts_as_loaded_once_the_device_has_copied_it(monkeypatch: pytest.MonkeyPatch) -> None:
    waited = []
    stream = SimpleNamespace(synchronize=lambda: waited.append("stream"))
    backends.wait_for_device()  # a CPU has nothing to wait for
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda: stream)
    backends.wait_for_device()
    assert waited == ["stream"]

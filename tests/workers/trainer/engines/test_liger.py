"""Calls of Liger, by a stand-in for its package, which needs a GPU to do anything."""

import sys
from types import ModuleType
from typing import Any

import pytest
import torch

from penstock.conf.errors import ConfigError
from penstock.workers.trainer.models.language_model import load_causal_lm, use_liger


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Arguments of each call, in order."""
    made: list[dict[str, Any]] = []
    package, transformers, patch = (
        ModuleType(f"liger_kernel{name}") for name in ("", ".transformers", ".transformers.monkey_patch")
    )
    transformers._apply_liger_kernel_to_instance = lambda **arguments: made.append(arguments)  # type: ignore[attr-defined]
    patch.MODEL_TYPE_TO_APPLY_LIGER_FN = {"qwen2": None, "llama": None}  # type: ignore[attr-defined]
    for module in (package, transformers, patch):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return made


def test_the_loaded_model_gets_kernels_but_for_the_loss(calls: list[dict[str, Any]], model_path: str) -> None:
    lm = load_causal_lm(model_path)
    before = {name: parameter.detach().clone() for name, parameter in lm.named_parameters()}
    use_liger(lm)
    assert calls == [{"model": lm, "fused_linear_cross_entropy": False, "cross_entropy": False}]
    assert all(torch.equal(parameter, before[name]) for name, parameter in lm.named_parameters())


def test_a_model_that_liger_would_leave_as_it_is_is_refused(calls: list[dict[str, Any]], model_path: str) -> None:
    lm = load_causal_lm(model_path)
    lm.config.model_type = "other"
    with pytest.raises(ConfigError, match=r"no kernels for models of type 'other'; it knows llama, qwen2\."):
        use_liger(lm)
    assert calls == []


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, model_path: str) -> None:
    monkeypatch.setitem(sys.modules, "liger_kernel", None)
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", None)
    with pytest.raises(ConfigError, match=r"trainer\.liger=true: .* Run pip install liger-kernel"):
        use_liger(load_causal_lm(model_path))

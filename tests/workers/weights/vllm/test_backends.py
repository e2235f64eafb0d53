"""Modules of an engine that are loaded layer by layer, and those that are loaded in place; what a process of vLLM asks
of the kernel."""

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn

pytestmark = pytest.mark.real
backends = pytest.importorskip("penstock.workers.weights.vllm.backends", reason="vLLM is not installed")


def model() -> nn.ModuleDict:
    layers = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    return nn.ModuleDict(
        {"model": nn.ModuleDict({"embed": nn.Embedding(3, 2), "layers": layers}), "head": nn.Linear(2, 3)}
    )


def test_a_model_of_which_nothing_is_left_out_is_one_part() -> None:
    whole = model()
    assert list(backends.modules_without(whole, [])) == [whole]


def test_parts_have_every_layer_but_those_left_out_once() -> None:
    whole = model()
    left_out = [whole["model"]["embed"], whole["head"]]
    parts = list(backends.modules_without(whole, left_out))
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


class Gate(nn.Module):
    """A router as vLLM has it: the bias is float32 whatever the engine's dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, 8, dtype=torch.bfloat16))
        self.bias = nn.Parameter(torch.zeros(4, dtype=torch.float32))


@pytest.mark.parametrize("layer_by_layer", [False, True])
def test_a_bias_in_float32_is_loaded_as_it_was_published(layer_by_layer: bool) -> None:
    from vllm.model_executor.model_loader.reload import record_metadata_for_reloading
    from vllm.model_executor.model_loader.weight_utils import default_weight_loader

    whole = nn.ModuleDict({"gate": Gate()})
    published = {"gate.weight": torch.rand(4, 8).bfloat16(), "gate.bias": torch.rand(4)}
    if layer_by_layer:
        record_metadata_for_reloading(whole)
        backends.initialize_layerwise_reload(whole)
    for name, tensor in published.items():
        parameter = whole.get_parameter(name)
        getattr(parameter, "weight_loader", default_weight_loader)(parameter, tensor)
    if layer_by_layer:
        backends.finalize_layerwise_reload(whole, None)
    for name, tensor in published.items():
        assert whole.get_parameter(name).dtype == tensor.dtype
        assert torch.equal(whole.get_parameter(name), tensor)


ASKED = """
import ctypes
from penstock.workers.weights.vllm.plugin import register
register()
import torch
allowed = ctypes.c_uint64()
ARCH_PRCTL, GET_PERMISSIONS, TILES = 158, 0x1022, 1 << 18
tiles = torch.cpu._is_amx_tile_supported()
assert not tiles or ctypes.CDLL(None).syscall(ARCH_PRCTL, GET_PERMISSIONS, ctypes.byref(allowed)) == 0
assert bool(allowed.value & TILES) == tiles
"""


def test_a_process_of_vllm_may_use_the_tiles_that_its_cpu_has() -> None:
    done = subprocess.run([sys.executable, "-c", ASKED], capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr

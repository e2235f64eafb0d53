"""A tiny model, and engines that serve it, each started once and driven from a background event loop."""

import asyncio
import threading
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch

from penstock.conf.model import FreshModelConfig
from penstock.conf.rollout import RolloutConfig
from penstock.conf.trainer import LoraConfig
from penstock.workers.fresh_model import build_fresh_model
from penstock.workers.protocols import AdapterLimits, EngineSpec, Publication
from penstock.workers.rollout.rollout_engines import make_engine
from penstock.workers.weights.publication.adapter import tensor_name
from tests.publications import write_publication

T = TypeVar("T")

MAX_MODEL_LEN = 512


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny_model")
    config = FreshModelConfig(num_layers=2, hidden_size=64, intermediate_size=96, num_heads=2, num_kv_heads=1)
    build_fresh_model(path, config, seed=7)
    return path


class EngineUnderTest:
    """An engine on an event loop in a background thread, the weights that it should be serving, and a model to check
    against."""

    adapter: LoraConfig | None = None
    limits: AdapterLimits | None = None
    policies: tuple[str, ...] = ()

    def __init__(self, name: str, model_path: Path, root: Path) -> None:
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(1)
        self.name = name
        self.root = root
        self.model_path = model_path
        self.model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()
        self.version = 0
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        config = RolloutConfig(engine=name, max_model_len=MAX_MODEL_LEN, kv_cache_gib=0.25)
        spec = EngineSpec(
            config, str(model_path), adapter=self.adapter, policies=self.policies, phase_timeout_s=30,
            adapters=self.limits,
        )  # fmt: skip
        self.engine: Any = make_engine(spec)
        self.call(self.engine.start())

    def call(self, coroutine: Coroutine[Any, Any, T], timeout_s: float = 300) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(timeout_s)

    def weights(self) -> dict[str, torch.Tensor]:
        """Weights of the checking model, by HF name, without the tied head."""
        return {name: tensor for name, tensor in self.model.state_dict().items() if name != "lm_head.weight"}

    def change_weights(self, seed: int) -> Publication:
        """Move the checking model's weights, publish them, and return the publication: the engine has not loaded it
        yet."""
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
        self.version += 1
        return write_publication(self.root, self.version, self.weights().items())

    def close(self) -> None:
        self.call(self.engine.close())
        self._loop.call_soon_threadsafe(self._loop.stop)


class AdapterEngineUnderTest(EngineUnderTest):
    """One that is sent adapters. The checking model has them added to its weights."""

    adapter = LoraConfig(rank=4, alpha=12, publish="adapter")

    def change_weights(self, seed: int) -> Publication:
        from safetensors.torch import load_file

        generator = torch.Generator().manual_seed(seed)
        base = load_file(self.model_path / "model.safetensors")
        tensors = {}
        for name, weight in self.weights().items():
            if "proj" not in name or weight.ndim < 2:
                continue
            num_out, num_in = weight.shape
            a = 0.3 * torch.randn(self.adapter.rank, num_in, generator=generator)
            b = 0.05 * torch.randn(num_out, self.adapter.rank, generator=generator)
            weight.copy_(base[name] + 3.0 * (b @ a))
            tensors |= {
                tensor_name(name.removesuffix(".weight"), letter): part for letter, part in (("A", a), ("B", b))
            }
        self.version += 1
        return write_publication(self.root, self.version, tensors.items())


KINDS = {"model": EngineUnderTest, "adapter": AdapterEngineUnderTest}
VLLM = pytest.mark.real


@pytest.fixture(
    scope="session",
    params=[
        "hf-model",
        "hf-adapter",
        pytest.param("vllm-model", marks=VLLM),
        pytest.param("vllm-adapter", marks=VLLM),
    ],
)
def served(
    request: pytest.FixtureRequest, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EngineUnderTest]:
    name, _, kind = request.param.partition("-")
    if name == "vllm":
        pytest.importorskip("vllm", reason="vLLM is not installed: its engine is not tested")
        request.getfixturevalue("warm_spawn")
    subject = KINDS[kind](name, tiny_model, tmp_path_factory.mktemp(f"publications_{request.param}"))
    yield subject
    subject.close()

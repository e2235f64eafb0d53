"""What an engine serves after a publication is what transformers computes from the same weights, however it is built:
split over two processes, or in bfloat16 from a float32 trainer."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from penstock.conf.model import FreshModelConfig
from penstock.conf.rollout import RolloutConfig
from penstock.workers.fresh_model import build_fresh_model
from penstock.workers.protocols import Completion, EngineSpec, Sampling
from penstock.workers.rollout.rollout_engines import make_engine
from tests.publications import write_publication

PROMPT = [20, 14, 21, 32, 50, 9, 33]
pytestmark = [pytest.mark.real, pytest.mark.usefixtures("warm_spawn")]
VLLM = pytest.param("vllm", marks=pytest.mark.real)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose heads divide by two and whose embedding is tied."""
    path = tmp_path_factory.mktemp("model")
    config = FreshModelConfig(num_layers=2, hidden_size=128, intermediate_size=192, num_heads=4, num_kv_heads=2)
    build_fresh_model(path, config, seed=3)
    return path


def moved_model(model_path: Path) -> Any:
    """Other weights than those the engine starts with, biases and norms included."""
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    return model


def served_after_load(model: Any, model_path: Path, root: Path, **settings: Any) -> Completion:
    """Greedy, from an engine that has loaded the model's publication."""
    config = RolloutConfig(max_model_len=256, kv_cache_gib=0.25, start_timeout_s=900, **settings)
    weights = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    publication = write_publication(root, 1, weights.items(), config.dtype)

    async def scenario() -> Completion:
        engine = make_engine(EngineSpec(config, str(model_path)))
        await engine.start()
        try:
            await engine.load(publication)
            assert await engine.version() == 1
            return (await engine.generate(PROMPT, 1, Sampling(temperature=0.0, max_tokens=24, ignore_eos=True)))[0]
        finally:
            await engine.close()

    return asyncio.run(scenario())


@torch.no_grad()
def reference_logprobs(model: Any, completion: Completion) -> torch.Tensor:
    """`[T, V]` of the response's positions."""
    ids = torch.tensor([[*PROMPT, *completion.token_ids]])
    return model(ids).logits[0, len(PROMPT) - 1 : -1].float().log_softmax(-1)


def test_two_tensor_parallel_ranks_load_and_answer_as_the_whole_model(model_path: Path, tmp_path: Path) -> None:
    pytest.importorskip("vllm", reason="vLLM is not installed: its engine is not tested")
    model = moved_model(model_path)
    two = served_after_load(model, model_path, tmp_path, engine="vllm", tensor_parallel_size=2)
    expected = reference_logprobs(model, two).max(-1)
    assert two.token_ids == expected.indices.tolist()
    assert len(two.token_ids) == 24
    torch.testing.assert_close(torch.tensor(two.logprobs), expected.values, rtol=0, atol=1e-4)


@pytest.mark.parametrize("engine", ["hf", VLLM])
def test_a_float32_trainers_weights_reach_a_bfloat16_engine_rounded_once(
    engine: str, model_path: Path, tmp_path: Path
) -> None:
    if engine == "vllm":
        pytest.importorskip("vllm", reason="vLLM is not installed: its engine is not tested")
    model = moved_model(model_path)
    completion = served_after_load(model, model_path, tmp_path, engine=engine, dtype="bfloat16")
    logprobs = reference_logprobs(model.bfloat16(), completion)
    chosen = logprobs.gather(-1, torch.tensor(completion.token_ids)[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(completion.logprobs), chosen, rtol=0, atol=0.1)
    assert torch.all(chosen > logprobs.max(-1).values - 0.1)

"""Engines that quantize what they load (vLLM's online quantization): they answer by the weights of the newest
publication alone."""

import asyncio
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from penstock.conf.model import FreshModelConfig
from penstock.conf.rollout import RolloutConfig
from penstock.workers.fresh_model import build_fresh_model
from penstock.workers.protocols import Completion, EngineSpec, Publication, Sampling
from penstock.workers.rollout.rollout_engines import make_engine
from tests.publications import write_publication

pytestmark = [pytest.mark.real, pytest.mark.usefixtures("warm_spawn")]
pytest.importorskip("vllm", reason="vLLM is not installed: its engine is not tested")
OPTIONS = {"quantization": "fp8_per_channel"}
PROMPT = [20, 14, 21, 32, 50, 9, 33]


def served(model_path: Path, *publications: Publication) -> list[Completion]:
    """What an engine answers when it starts, and after each publication."""
    config = RolloutConfig(
        engine="vllm", dtype="bfloat16", max_model_len=128, kv_cache_gib=0.1, engine_options=dict(OPTIONS),
        start_timeout_s=900,
    )  # fmt: skip

    async def scenario() -> list[Completion]:
        engine = make_engine(EngineSpec(config, str(model_path)))
        await engine.start()
        try:
            found = []
            for publication in (None, *publications):
                if publication is not None:
                    await engine.load(publication)
                found += await engine.generate(PROMPT, 1, Sampling(temperature=0.0, max_tokens=12, ignore_eos=True))
            return found
        finally:
            await engine.close()

    return asyncio.run(scenario())


def test_after_its_first_weights_again_it_answers_as_at_the_start(tmp_path: Path) -> None:
    """Other weights came in between."""
    shape = FreshModelConfig(num_layers=2, hidden_size=128, intermediate_size=192, num_heads=4, num_kv_heads=2)
    publications = []
    for version in (1, 2):
        path = tmp_path / str(version)
        build_fresh_model(path, shape, seed=version)
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        weights = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
        publications.append(write_publication(tmp_path / "published", version, weights.items(), "bfloat16"))
    first, moved, back = served(tmp_path / "1", publications[1], publications[0])
    assert moved.logprobs != first.logprobs
    assert (back.token_ids, back.logprobs) == (first.token_ids, first.logprobs)
    assert [set(one.versions) for one in (first, moved, back)] == [{0}, {2}, {1}]

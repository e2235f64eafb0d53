"""What becomes of vLLM's sequences when weights change (`rollout.on_update`): with `keep`, their next tokens are those
of the new weights over keys and values of the old ones; with `recompute`, the new weights have read them whole. No
other sequence has anything of the old weights, whether it waits when they change or comes later."""

import asyncio
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from penstock.conf.rollout import RolloutConfig
from penstock.metering.meters import Meters
from penstock.workers.protocols import Completion, EngineSpec, Sampling, SamplingProgress
from penstock.workers.rollout.engine_vllm import VllmEngine
from tests.publications import write_publication

pytestmark = [pytest.mark.real, pytest.mark.usefixtures("warm_spawn")]
pytest.importorskip("vllm", reason="vLLM is not installed: its engine is not tested")
PROMPT = [20 + place % 60 for place in range(70)]
"""Longer than two blocks of the cache, which others could find."""
LONG = Sampling(max_tokens=400, ignore_eos=True, seed=3)


def moved(model: Any) -> Any:
    other, generator = deepcopy(model), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    return other


@torch.no_grad()
def chosen(completion: Completion, *parts: tuple[Any, int]) -> torch.Tensor:
    """Log-probabilities of the response's tokens, where each model reads up to its place in prompt and response."""
    ids, cache, found, start = [*PROMPT, *completion.token_ids], DynamicCache(), [], 0
    for model, end in parts:
        found.append(model(torch.tensor([ids[start:end]]), past_key_values=cache).logits[0])
        start = end
    logprobs = torch.cat(found)[len(PROMPT) - 1 : -1].log_softmax(-1)
    return logprobs.gather(-1, torch.tensor(completion.token_ids)[:, None])[:, 0]


async def updated_in_flight(
    engine: VllmEngine, publication: Any
) -> tuple[list[Completion], list[Completion], SamplingProgress]:
    """Two samples in flight over a load, for which alone the engine has room; one that waits then, and one that comes
    later; and what the engine says of the load."""
    running = asyncio.create_task(engine.generate(PROMPT, 2, LONG))
    start = engine.sampled().num_tokens
    while engine.sampled().num_tokens - start < 2 * 40:
        await asyncio.sleep(0.001)
    waiting = asyncio.create_task(engine.generate(PROMPT, 1, LONG.seeded(8)))
    await asyncio.sleep(0.02)
    await engine.load(publication)
    late = await engine.generate(PROMPT, 1, LONG.seeded(9))
    return await running, [*await waiting, *late], engine.sampled()


@pytest.mark.parametrize("mode", ["keep", "recompute"])
def test_sequences_go_on_as_asked_and_no_other_has_anything_of_old_weights(
    mode: str, tiny_model: Path, tmp_path: Path
) -> None:
    torch.set_num_threads(1)
    old = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()
    new = moved(old)
    weights = {name: tensor for name, tensor in new.state_dict().items() if name != "lm_head.weight"}
    publication = write_publication(tmp_path, 1, weights.items())
    config = RolloutConfig(max_model_len=512, kv_cache_gib=0.1, max_concurrent_samples=2, on_update=mode)

    async def scenario() -> tuple[list[Completion], list[Completion], SamplingProgress]:
        engine = VllmEngine(EngineSpec(config, str(tiny_model)), Meters())
        await engine.start()
        try:
            return await updated_in_flight(engine, publication)
        finally:
            await engine.close()

    running, others, said = asyncio.run(scenario())
    for completion in running:
        before = completion.versions.count(0)
        assert 40 <= before < len(completion.versions)
        # The last token before the load is read by the new weights.
        first = (old, len(PROMPT) + before - 1)
        expected = chosen(completion, first, (new, len(PROMPT) + len(completion.token_ids)))
        if mode == "recompute":
            whole = chosen(completion, (new, len(PROMPT) + len(completion.token_ids)))
            assert not torch.allclose(whole[before:], expected[before:], atol=1e-3)
            expected = torch.cat([expected[:before], whole[before:]])
        torch.testing.assert_close(torch.tensor(completion.logprobs), expected, rtol=0, atol=1e-4)
    for completion in others:
        assert set(completion.versions) == {1}
        expected = chosen(completion, (new, len(PROMPT) + len(completion.token_ids)))
        torch.testing.assert_close(torch.tensor(completion.logprobs), expected, rtol=0, atol=1e-4)
    assert said.paused_s > 0
    # Both samples are read again, from one prompt whose whole blocks they share.
    assert said.num_read_again == 0 if mode == "keep" else said.num_read_again > len(PROMPT) + 2 * 40

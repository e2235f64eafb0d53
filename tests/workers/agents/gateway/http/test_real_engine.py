"""Agents over HTTP, a real vLLM engine, and weights that change at random moments: what is trained is what was sampled,
and the trainer says of each token what the engine said, under the weights that sampled it."""

import asyncio
import random
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from openai import LengthFinishReasonError
from transformers import AutoModelForCausalLM

from penstock.conf.model import FreshModelConfig
from penstock.conf.rollout import RolloutConfig
from penstock.conf.trainer import TrainerConfig
from penstock.store.data.rows import Rows
from penstock.workers.agents.gateway.chat_formats import TemplateFormat
from penstock.workers.agents.gateway.http_server import AttemptKeys, HttpServer
from penstock.workers.agents.gateway.turn_sampler import TurnLimits, TurnSampler
from penstock.workers.agents.trajectory import Trajectory, row_columns, segments_of
from penstock.workers.fresh_model import build_fresh_model
from penstock.workers.models.tokenizer import load_tokenizer
from penstock.workers.protocols import Completion, EngineSpec, Publication, Sampling
from penstock.workers.rollout.engine_vllm import VllmEngine
from penstock.workers.trainer.policy_trainer import PolicyTrainer
from tests.publications import write_publication
from tests.workers.agents.gateway.chat_models import SPECIAL, TEMPLATES
from tests.workers.agents.gateway.http.agents import KINDS
from tests.workers.agents.gateway.http.serving import Gateway
from tests.workers.agents.gateway.http.test_tokens import WORDS

pytestmark = pytest.mark.real
pytest.importorskip("vllm", reason="vLLM is not installed: its engine is not tested")

MODEL = FreshModelConfig(
    num_layers=2, hidden_size=64, intermediate_size=96, num_heads=2, num_kv_heads=1, max_position_embeddings=2048,
    words=SPECIAL,
)  # fmt: skip
NUM_VERSIONS, NUM_AGENTS, NUM_STEPS = 4, 4, 4
ATTEMPT = Sampling(max_tokens=48, seed=11)


class Engines:
    """The real engine, and all that it has sampled."""

    def __init__(self, engine: VllmEngine) -> None:
        self._engine = engine
        self.sampled: list[Completion] = []

    async def sample(self, prompt_ids: Sequence[int], sampling: Sampling, conversation: object) -> Completion:
        (completion,) = await self._engine.generate(prompt_ids, 1, sampling)
        self.sampled.append(completion)
        return completion


def versions_of(model_path: Path, root: Path) -> list[Publication]:
    """Publications of other weights, each beside a directory with the same as a model."""
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    publications = []
    for version in range(1, NUM_VERSIONS):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator))
        model.save_pretrained(root / f"v{version}")
        weights = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
        publications.append(write_publication(root / f"p{version}", version, weights.items()))
    return publications


async def talk(
    sampler: TurnSampler, engine: VllmEngine, publications: Sequence[Publication], rng: random.Random
) -> None:
    """Conversations side by side, with rewrites, and new weights in the middle of turns."""
    keys = AttemptKeys()
    server = HttpServer(keys)
    keys.base_url = await server.start("127.0.0.1", 0)
    url, key = keys.admit(sampler)
    open_gateway: Any = Gateway(keys, sampler, None, url, key)  # type: ignore[arg-type]

    async def converse(number: int) -> None:
        agent: Any = rng.choice(KINDS)(open_gateway, rng, f"You are number {number}.")
        for step in range(NUM_STEPS):
            (agent.compact if step and rng.random() < 0.25 else agent.ask)(f"{step} {rng.choice(WORDS)}")
            with suppress(
                LengthFinishReasonError, RuntimeError
            ):  # helpers of the client take no answer that is cut short
                await agent.go_on()

    async def update() -> None:
        for publication in publications:
            sampled = engine.sampled().num_tokens
            while engine.sampled().num_tokens < sampled + rng.randrange(100, 300):
                await asyncio.sleep(0.001)
            await engine.load(publication)

    try:
        updating = asyncio.ensure_future(update())
        await asyncio.gather(*(converse(number) for number in range(NUM_AGENTS)))
        updating.cancel()
    finally:
        await open_gateway.close()
        await server.stop()


@pytest.mark.promise("7", "Agents cannot be rewritten", "Engine and trainer disagree")
def test_the_trainer_agrees_on_every_token_of_every_version(tmp_path: Path) -> None:
    build_fresh_model(tmp_path / "v0", MODEL, seed=5)
    tokenizer = load_tokenizer(str(tmp_path / "v0"))
    tokenizer.chat_template = TEMPLATES["hermes"]
    publications = versions_of(tmp_path / "v0", tmp_path)

    async def scenario() -> tuple[TurnSampler, Engines]:
        config = RolloutConfig(max_model_len=2048, kv_cache_gib=0.25)
        engine = VllmEngine(EngineSpec(config, str(tmp_path / "v0")))
        await engine.start()
        engines = Engines(engine)
        sampler = TurnSampler(engines, TemplateFormat(tokenizer), ATTEMPT, TurnLimits(100, 100_000, 2048))
        try:
            await talk(sampler, engine, publications, random.Random(3))
        finally:
            await engine.close()
        return sampler, engines

    sampler, engines = asyncio.run(scenario())
    turns = sampler.turns
    assert len(turns) == len(engines.sampled) == NUM_AGENTS * NUM_STEPS
    assert len(segments_of(turns)) < len(turns), "no conversation went on"
    columns = row_columns([Trajectory(turns)])
    rows = Rows.from_lists({name: columns[name] for name in ("response_ids", "context_ids", "spans")})
    sampled = sorted(zip_tokens(engines.sampled))
    versions, logprobs = columns["token_versions"][0], columns["behavior_logprobs"][0]
    assert (
        sorted(zip(columns["response_ids"][0].tolist(), versions.tolist(), logprobs.tolist(), strict=True)) == sampled
    )
    assert any(len(set(turn.versions)) > 1 for turn in turns), "no update came in the middle of a turn"
    for version in sorted(set(versions.tolist())):
        trainer = PolicyTrainer(TrainerConfig(), str(tmp_path / f"v{version}"))
        (said,) = trainer.logprobs(rows)
        trainer.close()
        where = versions == version
        assert np.abs(said[where] - logprobs[where]).max() < 1e-4


def zip_tokens(completions: Sequence[Completion]) -> list[tuple[int, int, float]]:
    """Token, version and log-probability, float32, of all that was sampled."""
    return [
        (token, version, float(np.float32(logprob)))
        for one in completions
        for token, version, logprob in zip(one.token_ids, one.versions, one.logprobs, strict=True)
    ]

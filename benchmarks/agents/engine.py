"""A real vLLM engine in a Ray actor, as in a run, and samplers over it."""

import contextlib
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import ray

from penstock.conf.model import FreshModelConfig
from penstock.conf.rollout import RolloutConfig
from penstock.workers.agents.attempts_actor import ask
from penstock.workers.agents.gateway.chat_formats import TemplateFormat
from penstock.workers.agents.gateway.engine_pool import EnginePool
from penstock.workers.agents.gateway.turn_sampler import TurnLimits, TurnSampler
from penstock.workers.fresh_model import build_fresh_model
from penstock.workers.models.tokenizer import load_tokenizer
from penstock.workers.protocols import EngineSpec, Sampling
from penstock.workers.rollout.rollout_actor import Rollout, RolloutSpec

MODEL = FreshModelConfig(
    num_layers=8, hidden_size=512, intermediate_size=1408, num_heads=8, num_kv_heads=4, max_position_embeddings=2048
)
"""A model of 26M parameters: tokens that cost something, even on a CPU."""
MAX_LEN, CONCURRENT = 2048, 32


class Engine:
    """An engine that serves requests alone."""

    def __init__(self, handle: Any, model_path: str) -> None:
        self.handle = handle
        self.pool = EnginePool(ask, timeout_s=600.0)
        self.pool.update({"Rollout-0": handle})
        self.tokenizer = load_tokenizer(model_path)
        self._form = TemplateFormat(self.tokenizer, "none")
        self.counts: Counter[str] = Counter()

    def sampler(self, sampling: Sampling) -> TurnSampler:
        return TurnSampler(self.pool, self._form, sampling, TurnLimits(64, 100_000, MAX_LEN), counts=self.counts)

    def prompt_ids(self, text: str) -> list[int]:
        """Token ids of a user's message."""
        return self._form.prompt_ids([{"role": "user", "content": text}], ())

    async def direct(self, texts: Sequence[str], samplings: Sequence[Sampling]) -> int:
        """Ask the engine for these in one call. Returns the number of tokens that it samples."""
        prompts = [self.prompt_ids(text) for text in texts]
        groups = await self.handle.generate.remote(prompts, 1, samplings)
        return sum(len(completion.token_ids) for (completion,) in groups)


@contextlib.contextmanager
def engine(num_samples: int = CONCURRENT, kv_cache_gib: float = 1.0) -> Iterator[Engine]:
    """Start an engine in its own Ray, which ends with it. `num_samples`: that it decodes at once."""
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "model")
        build_fresh_model(path, MODEL, seed=0)
        ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
        try:
            config = RolloutConfig(max_model_len=MAX_LEN, max_concurrent_samples=num_samples, kv_cache_gib=kv_cache_gib)
            spec = RolloutSpec("Rollout-0", EngineSpec(config, path), 0, 1, pulls=False)
            handle = ray.remote(Rollout).options(max_concurrency=10_000).remote(spec)
            ray.get(handle.start.remote(), timeout=600)
            yield Engine(handle, path)
        finally:
            ray.shutdown()

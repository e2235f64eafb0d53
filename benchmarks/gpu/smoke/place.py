"""What a step of the smoke run has at hand: the GPUs of this machine, a folder, tiny models, and what it has to say."""

import json
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from penstock.conf.model import FreshModelConfig
from penstock.conf.rollout import RolloutConfig
from penstock.conf.trainer import OptimizerConfig, TrainerConfig
from penstock.store.data.rows import Rows
from penstock.workers.fresh_model import build_fresh_model
from penstock.workers.protocols import EngineSpec
from penstock.workers.trainer.policy_trainer import PolicyTrainer
from penstock.workers.trainer.ranks import Ranks

MODEL = FreshModelConfig(
    num_layers=2, hidden_size=128, intermediate_size=256, num_heads=2, num_kv_heads=2, max_position_embeddings=256
)
"""Two heads of 64, which kernels for GPUs know and two of them can share."""
MAX_LENGTH = 128


class Failed(Exception):
    """What a step has found to be wrong."""


@dataclass
class Place:
    """Lifecycle: made by a step's process; `said` and `left_out` are what it tells."""

    folder: Path
    num_gpus: int
    said: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    @property
    def has_gpu(self) -> bool:
        return self.num_gpus > 0

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", 0) if self.has_gpu else torch.device("cpu")

    @cached_property
    def model(self) -> Path:
        """A tiny random model with a tokenizer of characters."""
        path = self.folder / "model"
        if not path.exists():
            build_fresh_model(path, MODEL, seed=1)
        return path

    @property
    def preset(self) -> dict[str, Any]:
        """What presets of models say on GPUs: bfloat16 and captured graphs. On the CPU float32, without graphs."""
        dtype = "bfloat16" if self.has_gpu else "float32"
        return {"rollout.dtype": dtype, "trainer.dtype": dtype, "rollout.enforce_eager": not self.has_gpu}

    def say(self, text: str) -> None:
        print(f"  {text}", flush=True)
        self.said.append(text)

    def leave_out(self, what: str) -> None:
        print(f"  left out: {what}", flush=True)
        self.left_out.append(what)

    def needs(self, num_gpus: int, what: str) -> bool:
        """Whether there are as many GPUs. Else what needs them is noted as left out."""
        if self.num_gpus < num_gpus:
            self.leave_out(f"{what} ({num_gpus} GPU{'s' if num_gpus > 1 else ''})")
        return self.num_gpus >= num_gpus

    def near(self, what: str, found: Any, expected: Any, within: float) -> None:
        """Say by how much two arrays differ. Raises `Failed` where that is too much."""
        difference = float(np.abs(np.asarray(found, np.float64) - np.asarray(expected, np.float64)).max())
        if not difference <= within:
            raise Failed(f"{what}: differs by {difference:.2e}, more than {within:.0e}")
        self.say(f"{what}: within {difference:.1e}")

    def trainer(self, model: Path | None = None, *, on_gpu: bool | None = None, **options: Any) -> PolicyTrainer:
        """A rank alone, on the GPU if there is one."""
        on_gpu = self.has_gpu if on_gpu is None else on_gpu
        attention = options.pop("attention", "sdpa")
        config = TrainerConfig(num_gpus_per_rank=float(on_gpu), optimizer=OptimizerConfig(lr=1e-3), **options)
        ranks = Ranks.join(config)
        ranks.device = self.device if on_gpu else torch.device("cpu")
        return PolicyTrainer(config, str(model or self.model), ranks, attention=attention)

    def engine_spec(self, model: Path | None = None, *, share: float = 1.0, **options: Any) -> EngineSpec:
        """A vLLM engine, with that share of a GPU if there is one."""
        config = RolloutConfig(
            num_gpus_per_worker=share if self.has_gpu else 0, max_model_len=MAX_LENGTH, kv_cache_gib=0.1,
            gpu_memory_utilization=0.3, dtype=self.preset["rollout.dtype"],
            enforce_eager=self.preset["rollout.enforce_eager"],
        )  # fmt: skip
        return EngineSpec(config, str(model or self.model), **options)

    def prompts(self) -> Path:
        path = self.folder / "prompts.jsonl"
        path.write_text("\n".join(json.dumps({"question": f"{i} and {i * i}", "answer": str(i)}) for i in range(64)))
        return path


def some_rows(seed: int = 0, num_rows: int = 8) -> Rows:
    """Rows as GRPO trains them, of ragged lengths."""
    random = np.random.default_rng(seed)
    responses = [random.integers(3, 90, random.integers(4, 33)).tolist() for _ in range(num_rows)]
    return Rows.from_lists(
        {
            "prompt_ids": [random.integers(3, 90, 8).tolist() for _ in responses],
            "response_ids": responses,
            "behavior_logprobs": [np.full(len(ids), -4.5, np.float32) for ids in responses],
            "advantage": random.normal(size=num_rows).tolist(),
        },
        group_ids=[index // 2 for index in range(num_rows)],
    )

"""The peak of our own training step, as torch's `MemTracker` counts it, is told beforehand within 15%."""

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed._tools.mem_tracker import MemTracker

from penstock.algorithms.losses import ppo_clip_loss
from penstock.conf.model import FreshModelConfig
from penstock.conf.trainer import LoraConfig, TrainerConfig
from penstock.orchestrator.configuration import rank_memory as told
from penstock.orchestrator.configuration.measured_shape import measured_shape
from penstock.orchestrator.configuration.model_shape import ModelShape
from penstock.store.data.rows import Rows
from penstock.workers.fresh_model import build_fresh_model
from penstock.workers.trainer.engines import fsdp
from penstock.workers.trainer.models import streamed_layers
from penstock.workers.trainer.policy_trainer import PolicyTrainer

QWEN2 = FreshModelConfig(
    num_layers=3, hidden_size=128, intermediate_size=352, num_heads=4, num_kv_heads=2, max_position_embeddings=256
)
EXPERTS = {
    "hidden_size": 128, "intermediate_size": 256, "moe_intermediate_size": 64, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "num_experts": 8, "num_experts_per_tok": 2,
    "vocab_size": 1000, "max_position_embeddings": 256, "tie_word_embeddings": False,
}  # fmt: skip
OTHER = {
    "hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 1000, "max_position_embeddings": 256,
}  # fmt: skip
ROW_TOKENS, PROMPT_TOKENS = 128, 8
ALL, PARTS = {}, {"max_tokens_per_microbatch": 256}
OF_EXPERTS = LoraConfig(rank=4, target_modules=["all-linear", "gate_up_proj", "down_proj"])
BFLOAT16, RECOMPUTED = {"dtype": "bfloat16"}, {"activation_checkpointing": True}
STREAMED, CHUNK_TOKENS = {"activation_checkpointing": "stream"}, 32
SETTINGS: dict[str, tuple[str, bool, dict[str, Any]]] = {
    # model, kept whole, options
    "float32": ("qwen2", True, ALL),
    "bfloat16 in micro-batches": ("qwen2", True, BFLOAT16 | PARTS),
    "recomputed": ("qwen2", True, RECOMPUTED),
    "by layer, bfloat16 recomputed": ("qwen2", False, BFLOAT16 | RECOMPUTED | PARTS),
    "streamed": ("qwen2", True, STREAMED),
    "by layer, bfloat16 streamed": ("qwen2", False, BFLOAT16 | STREAMED | PARTS),
    "lora, streamed": ("qwen2", True, {"lora": LoraConfig(rank=8)} | STREAMED | PARTS),
    "experts, bfloat16 streamed": ("experts", False, BFLOAT16 | STREAMED | PARTS),
    "small micro-batches": ("qwen2", False, BFLOAT16 | {"max_tokens_per_microbatch": 128}),
    "lora": ("qwen2", True, {"lora": LoraConfig(rank=8)} | PARTS),
    "lora, bfloat16 recomputed": ("qwen2", False, {"lora": LoraConfig(rank=8)} | BFLOAT16 | RECOMPUTED | PARTS),
    "tiles of logits": ("experts", False, {"logprob_chunk_mib": 2.0} | PARTS),
    "experts": ("experts", False, PARTS),
    "experts, bfloat16 recomputed": ("experts", False, BFLOAT16 | RECOMPUTED | PARTS),
    "lora of experts": ("experts", False, {"lora": OF_EXPERTS} | PARTS),
    "of no known kind": ("gemma2", False, PARTS),
    "of no known kind, bfloat16": ("gemma2", True, BFLOAT16 | PARTS),
    "of no known kind, bfloat16 recomputed": ("gemma2", False, BFLOAT16 | RECOMPUTED | PARTS),
    "lora of experts, bfloat16 recomputed": ("experts", False, {"lora": OF_EXPERTS} | BFLOAT16 | RECOMPUTED | PARTS),
}


class TotalTracker(MemTracker):
    """torch's tracker without its statistics by module, for which it allows one forward alone."""

    def _pre_fw_hook(self, *_: Any) -> None: ...
    def _post_fw_hook(self, *_: Any) -> None: ...
    def _pre_bw_hook(self, *_: Any) -> None: ...
    def _post_bw_hook(self, *_: Any) -> None: ...


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    from transformers import AutoModelForCausalLM, Gemma2Config, Qwen3MoeConfig

    paths = {name: tmp_path_factory.mktemp(name) for name in ("qwen2", "experts", "gemma2")}
    build_fresh_model(paths["qwen2"], QWEN2, seed=0)
    AutoModelForCausalLM.from_config(Qwen3MoeConfig(**EXPERTS)).save_pretrained(paths["experts"])
    AutoModelForCausalLM.from_config(Gemma2Config(**OTHER)).save_pretrained(paths["gemma2"])
    return paths


@pytest.mark.parametrize("name", SETTINGS)
def test_the_peak_of_a_step_is_told_within_15_percent(
    name: str, models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, whole, options = SETTINGS[name]
    for module in (fsdp, told):
        monkeypatch.setattr(module, "KEEP_WHOLE_BYTES", 2**31 if whole else 0)
    for module in (streamed_layers, told):
        monkeypatch.setattr(module, "CPU_CHUNK_TOKENS", CHUNK_TOKENS)
    config = TrainerConfig(**options)
    rows = random_rows(4)
    values = json.loads((models[model] / "config.json").read_text())
    shape = ModelShape.of(values) or measured_shape(values)
    assert shape is not None
    tokens = min(len(rows) * ROW_TOKENS, config.microbatch_tokens)
    is_only = tokens == len(rows) * ROW_TOKENS
    setting = told.RankSetting(shape, config, tokens, ROW_TOKENS, is_only=is_only, on_gpu=False)
    assert told.rank_memory(setting).total == pytest.approx(measured(config, models[model], rows), rel=0.15)


def measured(config: TrainerConfig, path: Path, rows: Rows) -> float:
    """Bytes at the peak of the second update, when there are moments."""
    trainer = PolicyTrainer(config, str(path))
    loss = partial(ppo_clip_loss)
    try:
        trainer.update(random_rows(1), loss)
        tracker = TotalTracker()
        assert trainer.engine.optimizer is not None
        tracker.track_external(trainer.model, trainer.engine.optimizer)
        with tracker:
            trainer.update(rows, loss)
        return float(tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"])
    finally:
        trainer.close()


def random_rows(num_rows: int) -> Rows:
    random = np.random.default_rng(0)
    lengths = PROMPT_TOKENS, ROW_TOKENS - PROMPT_TOKENS
    prompts, responses = (random.integers(3, 90, (num_rows, length)).tolist() for length in lengths)
    return Rows.from_lists(
        {
            "prompt_ids": prompts,
            "response_ids": responses,
            "behavior_logprobs": [[-4.5] * lengths[1]] * num_rows,
            "advantage": random.normal(size=num_rows).tolist(),
        },
        group_ids=list(range(num_rows)),
    )

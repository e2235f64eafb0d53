"""The policy update on one GPU: tokens a second and peak memory, by attention and activation checkpointing.

    python -m benchmarks.gpu.training --json gpu_training.json

A random Qwen2 of 0.5B parameters with a vocabulary of 152k, FSDP2 on one rank, bfloat16 compute over float32 master
weights, GRPO's loss, responses of long-tailed lengths. `flash_attention_2` is measured where `flash_attn` is installed.
"""

import importlib.util
import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.gpu.machine import count_gpus, gpu_names, write_model
from benchmarks.harness import new_table, parse_arguments, show, write_json
from penstock.algorithms.losses import ppo_clip_loss
from penstock.conf.trainer import OptimizerConfig, TrainerConfig
from penstock.store.data.rows import Rows
from penstock.workers.trainer.trainer import PolicyTrainer

NUM_ROUNDS = 5
NUM_ROWS = 128
GROUP_SIZE = 8
PROMPT_TOKENS = 128
MAX_RESPONSE_TOKENS = 2048
TAIL = 0.6
"""Sigma of the log-normal response lengths, whose median is a quarter of the longest."""


@dataclass(frozen=True)
class Setting:
    attention: str
    checkpointing: bool

    @property
    def name(self) -> str:
        return f"{self.attention}, {'recomputed' if self.checkpointing else 'kept'} activations"


def settings() -> list[Setting]:
    attentions = ["sdpa"] + (["flash_attention_2"] if importlib.util.find_spec("flash_attn") else [])
    return [Setting(attention, checkpointing) for attention in attentions for checkpointing in (False, True)]


def random_rows(num_rows: int, longest: int, seed: int) -> Rows:
    random = np.random.default_rng(seed)
    lengths = np.clip(random.lognormal(np.log(longest / 4), TAIL, num_rows), 1, longest).astype(int)
    responses = [random.integers(3, 90, length).tolist() for length in lengths]
    return Rows.from_lists(
        {
            "prompt_ids": [random.integers(3, 90, PROMPT_TOKENS).tolist() for _ in lengths],
            "response_ids": responses,
            "behavior_logprobs": [np.full(len(ids), -10.0, np.float32) for ids in responses],
            "advantage": random.normal(size=num_rows).tolist(),
        },
        group_ids=[index // GROUP_SIZE for index in range(num_rows)],
    )


def measure(
    setting: Setting, model_path: Path, rows: Rows, *, num_rounds: int, config: dict[str, Any]
) -> list[dict[str, Any]]:
    """Measure rounds of one setting. The first is left out: it allocates. `config`: of the trainer."""
    on_gpu = config.get("num_gpus_per_rank", 0) > 0
    options = TrainerConfig(
        activation_checkpointing=setting.checkpointing, optimizer=OptimizerConfig(lr=1e-7), **config
    )
    trainer = PolicyTrainer(options, str(model_path), attention=setting.attention)
    num_tokens = int(rows.lengths("prompt_ids").sum() + rows.lengths("response_ids").sum())
    rounds = []
    try:
        for _ in range(num_rounds + 1):
            if on_gpu:
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
            report = trainer.update(rows, ppo_clip_loss)
            if on_gpu:
                torch.cuda.synchronize()
            seconds = report.seconds["update"]
            rounds.append(
                {
                    "setting": setting.name,
                    "seconds": seconds,
                    "parts": report.seconds,
                    "tokens_per_s": num_tokens / seconds,
                    "peak_gpu_bytes": torch.cuda.max_memory_allocated() if on_gpu else 0,
                }
            )
    finally:
        trainer.close()
    return rounds[1:]


def print_rounds(rounds: list[dict[str, Any]]) -> None:
    table = new_table("One policy update, medians", ["setting"], ["seconds", "tokens/s", "peak memory"])
    for name in dict.fromkeys(entry["setting"] for entry in rounds):
        some = [entry for entry in rounds if entry["setting"] == name]
        seconds, speed, peak = (
            statistics.median(entry[key] for entry in some) for key in ("seconds", "tokens_per_s", "peak_gpu_bytes")
        )
        table.add_row(name, f"{seconds:.2f}", f"{speed:,.0f}", f"{peak / 2**30:.1f} GiB")
    show(table)


def main() -> None:
    arguments = parse_arguments(__doc__)
    count_gpus("training")
    num_rounds = 1 if arguments.quick else arguments.rounds or NUM_ROUNDS
    num_rows, longest = (16, 256) if arguments.quick else (NUM_ROWS, MAX_RESPONSE_TOKENS)
    config = {"dtype": "bfloat16", "num_gpus_per_rank": 1, "max_tokens_per_microbatch": 16384}
    rounds: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
        num_parameters = write_model(Path(folder), "small" if arguments.quick else "0.5b", torch.device("cuda", 0))
        rows = random_rows(num_rows, longest, seed=0)
        for setting in settings():
            rounds += measure(setting, Path(folder), rows, num_rounds=num_rounds, config=config)
            print(rounds[-1], flush=True)
            torch.cuda.empty_cache()
    print_rounds(rounds)
    write_json(arguments.json, "gpu_training", rounds, [], gpus=gpu_names(), parameters=num_parameters)


if __name__ == "__main__":
    main()

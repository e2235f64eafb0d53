"""The policy update on one GPU, by what the trainer can be told: tokens a second, and peak memory beside what
`penstock validate` says beforehand.

    python -m benchmarks.gpu.training --json gpu_training.json

A random Qwen2 of 0.5B parameters with a vocabulary of 152k, FSDP2 on one rank, bfloat16 compute over float32 master
weights, GRPO's loss, groups of one prompt, responses of long-tailed lengths. What needs `flash_attn` or `liger_kernel`
is measured where they are installed.
"""

import importlib.util
import json
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
from penstock.orchestrator.configuration.model_shape import ModelShape
from penstock.orchestrator.configuration.rank_memory import RankSetting, rank_memory
from penstock.store.data.rows import Rows
from penstock.workers.trainer.policy_trainer import PolicyTrainer

NUM_ROUNDS = 5
NUM_ROWS = 128
GROUP_SIZE = 8
PROMPT_TOKENS = 128
MAX_RESPONSE_TOKENS = 2048
TAIL = 0.6
"""Sigma of the log-normal response lengths, whose median is a quarter of the longest."""


OPTIONS: dict[str, dict[str, Any]] = {
    "kept": {},
    "recomputed": {"activation_checkpointing": True},
    "recomputed in chunks": {"activation_checkpointing": "stream"},
    "packed": {"packing": "always"},
    "shared prefixes": {"share_prefixes": "always"},
    "compiled": {"compile": True},
    "liger": {"liger": True},
    "liger, compiled": {"liger": True, "compile": True},
    "activations on the host": {"activation_offload": True},
    "inputs of layers on the host": {"activation_offload": True, "activation_checkpointing": True},
    "offload": {"offload": True},
}
"""Options of the trainer by the name of the setting."""
FLASH: tuple[str, ...] = ("kept", "recomputed", "packed")
"""Settings that are measured with `flash_attention_2` too."""


@dataclass(frozen=True)
class Setting:
    attention: str
    called: str
    """One of `OPTIONS`."""

    @property
    def options(self) -> dict[str, Any]:
        return OPTIONS[self.called]

    @property
    def name(self) -> str:
        return f"{self.attention}, {self.called}"


def settings() -> list[Setting]:
    has_liger, has_flash = (importlib.util.find_spec(name) is not None for name in ("liger_kernel", "flash_attn"))
    found = [Setting("sdpa", name) for name, options in OPTIONS.items() if has_liger or "liger" not in options]
    return found + [Setting("flash_attention_2", name) for name in FLASH if has_flash]


def random_rows(num_rows: int, longest: int, seed: int) -> Rows:
    random = np.random.default_rng(seed)
    lengths = np.clip(random.lognormal(np.log(longest / 4), TAIL, num_rows), 1, longest).astype(int)
    responses = [random.integers(3, 90, length).tolist() for length in lengths]
    prompts = [random.integers(3, 90, PROMPT_TOKENS).tolist() for _ in range(-(-num_rows // GROUP_SIZE))]
    return Rows.from_lists(
        {
            "prompt_ids": [prompts[index // GROUP_SIZE] for index in range(num_rows)],
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
    base = {"packing": "never", "share_prefixes": "never"} | config
    options = TrainerConfig(optimizer=OptimizerConfig(lr=1e-7), **base | setting.options)
    trainer = PolicyTrainer(options, str(model_path), attention=setting.attention)
    told = told_bytes(setting, options, model_path, rows)
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
                    "told_bytes": told,
                }
            )
    finally:
        trainer.close()
    return rounds[1:]


def told_bytes(setting: Setting, config: TrainerConfig, model_path: Path, rows: Rows) -> float:
    """Bytes of a rank's peak as `penstock validate` has them."""
    shape = ModelShape.of(json.loads((model_path / "config.json").read_text()))
    assert shape is not None
    longest = int((rows.lengths("prompt_ids") + rows.lengths("response_ids")).max())
    told = RankSetting(shape, config, config.microbatch_tokens, longest, attention=setting.attention)
    return rank_memory(told).total


def print_rounds(rounds: list[dict[str, Any]]) -> None:
    table = new_table("One policy update, medians", ["setting"], ["seconds", "tokens/s", "peak memory", "told"])
    for name in dict.fromkeys(entry["setting"] for entry in rounds):
        some = [entry for entry in rounds if entry["setting"] == name]
        seconds, speed, peak, told = (
            statistics.median(entry[key] for entry in some)
            for key in ("seconds", "tokens_per_s", "peak_gpu_bytes", "told_bytes")
        )
        table.add_row(name, f"{seconds:.2f}", f"{speed:,.0f}", f"{peak / 2**30:.1f} GiB", f"{told / 2**30:.1f} GiB")
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

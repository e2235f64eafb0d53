"""TRL's trainer, held between rounds by its own callbacks. `trl_grpo.py` sets the environment before.

trainer.train() ─▶ first step begins: say ready, wait ─▶ K steps ─▶ the last one ends: answer, wait ─▶ …
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
import time

import torch
import transformers
import trl
from datasets import Dataset
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, TrainerCallback

from benchmarks.peers.channel import Channel

SETTINGS = ("workload", "engine", "threads", "micro_batch", "attention", "cache", "optimizer")
MAX_PROMPT_TOKENS = 64
"""Most tokens of a prompt: more than any prompt of the benchmarks has."""


def digit_share(completions: list[str], **_: object) -> list[float]:
    """The reward: the share of digits among a completion's characters."""
    return [sum("0" <= c <= "9" for c in text) / len(text) if text else 0.0 for text in completions]


class Meter:
    """Counts of what was done in the current round. The trainer's hooks feed it."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.samples = 0
        self.tokens = 0
        self.longest = 0
        self.reward = 0.0
        self.cpu_start = time.process_time()
        self.step_seconds: list[float] = []
        self.generation_seconds: list[float] = []

    def count(self, completion_ids: list[list[int]], rewards: list[float]) -> None:
        lengths = [len(ids) for ids in completion_ids]
        self.samples += len(lengths)
        self.tokens += sum(lengths)
        self.longest = max(self.longest, *lengths)
        self.reward += sum(rewards)

    def report(self, seconds: float) -> dict:
        return {
            "seconds": seconds,
            "cpu_seconds": time.process_time() - self.cpu_start,
            "samples": self.samples,
            "tokens": self.tokens,
            "step_seconds": self.step_seconds,
            "generation_seconds": self.generation_seconds,
            "reward_mean": self.reward / max(self.samples, 1),
            "longest": self.longest,
        }


class Rounds(TrainerCallback):
    """A callback that holds the training between rounds, inside the callback that ends a step."""

    def __init__(self, channel: Channel, meter: Meter, settings: dict, directory: str) -> None:
        self._channel, self._meter, self._settings, self._directory = channel, meter, settings, directory
        self._left = 0

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == 0 and not self._left:  # the first step of all
            versions = {module.__name__: module.__version__ for module in (trl, transformers, torch)}
            self._channel.send({"ready": True, "versions": versions, "settings": self._settings})
            if not self._wait():
                self._leave()
        return control

    def on_step_end(self, args, state, control, **kwargs):
        now = time.perf_counter()
        self._meter.step_seconds.append(now - self._last)
        self._last = now
        self._left -= 1
        if not self._left:
            self._channel.send(self._meter.report(now - self._start))
            if not self._wait():
                control.should_training_stop = True
        return control

    def _wait(self) -> bool:
        for request in self._channel.requests():
            if self._begin(int(request["steps"])):
                return True
            self._channel.send(Meter().report(0.0))
        return False

    def _begin(self, num_steps: int) -> bool:
        self._left = num_steps
        self._meter.clear()
        self._start = self._last = time.perf_counter()
        return num_steps > 0

    def _leave(self) -> None:
        """Leave at once, when no step was ever asked for: there is no callback by which to cancel a begun step."""
        shutil.rmtree(self._directory, ignore_errors=True)
        os._exit(0)


class TimedTrainer(trl.GRPOTrainer):
    def __init__(self, meter: Meter, **options) -> None:
        self._meter = meter
        super().__init__(**options)

    def _generate_single_turn(self, *args, **kwargs):
        start = time.perf_counter()
        if self.use_vllm:  # it has the newest weights already, as far as TRL knows
            self._last_loaded_step = self.state.global_step
        result = super()._generate_single_turn(*args, **kwargs)
        self._meter.generation_seconds.append(time.perf_counter() - start)
        return result


def train(arguments: argparse.Namespace, channel: Channel) -> None:
    torch.set_num_threads(arguments.threads)
    meter = Meter()
    settings = {name: getattr(arguments, name) for name in SETTINGS}
    directory = tempfile.mkdtemp(prefix="trl_grpo_")

    def reward(completions: list[str], completion_ids: list[list[int]], **_: object) -> list[float]:
        rewards = digit_share(completions)
        meter.count(completion_ids, rewards)
        return rewards

    trainer = TimedTrainer(
        meter,
        model=AutoModelForCausalLM.from_pretrained(
            arguments.model, dtype=torch.float32, attn_implementation=arguments.attention
        ),
        reward_funcs=reward,
        args=make_config(arguments, directory),
        train_dataset=Dataset.from_dict({"prompt": read_prompts(arguments.prompts)}),
        # Not AutoTokenizer: from the model's type it may pick a class whose pre-tokenizer is not the one in the file.
        processing_class=PreTrainedTokenizerFast.from_pretrained(arguments.model, padding_side="left"),
        callbacks=[Rounds(channel, meter, settings, directory)],
    )
    try:
        trainer.train()
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def read_prompts(file: str) -> list[str]:
    with open(file, encoding="utf-8") as lines:
        return [json.loads(line)["prompt"] for line in lines if line.strip()]


def engine_settings(arguments: argparse.Namespace) -> dict:
    """Settings of TRL's configuration: which engine samples, and how a completion is kept from ending before its
    time."""
    is_fixed = arguments.workload == "fixed"
    longest = MAX_PROMPT_TOKENS + arguments.max_new_tokens
    if arguments.engine == "vllm":
        return {
            "use_vllm": True,
            "vllm_mode": "colocate",
            "vllm_max_model_length": longest,
            "vllm_importance_sampling_correction": False,
            "generation_kwargs": {"ignore_eos": is_fixed},
        }
    if arguments.engine == "continuous":
        samples = arguments.prompts_per_step * arguments.samples_per_prompt
        page = arguments.page_tokens
        cache = {"page_size": page, "num_blocks": samples * (longest // page + 1)}
        return {
            "use_transformers_continuous_batching": True,
            "transformers_continuous_batching_config": {**cache, "max_batch_tokens": arguments.batch_tokens},
            # It has no min_new_tokens. -1: no token ends a completion.
            "generation_kwargs": {"eos_token_id": -1} if is_fixed else {},
        }
    return {
        "cache_implementation": None if arguments.cache == "dynamic" else arguments.cache,
        "generation_kwargs": {"min_new_tokens": arguments.max_new_tokens} if is_fixed else {},
    }


def make_config(arguments: argparse.Namespace, directory: str) -> trl.GRPOConfig:
    samples = arguments.prompts_per_step * arguments.samples_per_prompt
    return trl.GRPOConfig(
        output_dir=directory,
        # The workload.
        per_device_train_batch_size=arguments.micro_batch,
        # Also TRL's steps_per_generation: all samples of a step are fresh.
        gradient_accumulation_steps=samples // arguments.micro_batch,
        num_generations=arguments.samples_per_prompt,
        max_completion_length=arguments.max_new_tokens,
        temperature=1.0,
        **engine_settings(arguments),
        num_iterations=1,
        beta=0.0,
        loss_type="grpo",
        learning_rate=arguments.learning_rate,
        lr_scheduler_type="constant",
        max_grad_norm=1.0,
        max_steps=10**9,
        seed=arguments.seed,
        shuffle_dataset=False,
        # Only the speed.
        optim=arguments.optimizer,
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        dataloader_num_workers=0,
        dataloader_pin_memory=False,
        logging_strategy="no",
        logging_nan_inf_filter=False,
        save_strategy="no",
        eval_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )

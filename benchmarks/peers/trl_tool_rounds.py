"""TRL's trainer with a tool, held between rounds as `trl_rounds.py` does it."""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from benchmarks.peers.channel import Channel
from benchmarks.peers.trl_rounds import Meter, Rounds, TimedTrainer, make_config

SETTINGS = ("way", "threads", "micro_batch", "attention", "cache", "optimizer")
RESPONSE_TEMPLATE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "tool_calls": {
            "open": "<tool_call>",
            "close_pattern": r"</tool_call>\s*",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close_pattern": r"<eos>\s*", "content": "text"},
    },
}
"""TRL's response template for Qwen3 (`trl.chat_template_utils.qwen3_template`), but for the thinking and the last
token."""


def add(a: int, b: int) -> int:
    """
    The sum of two numbers.

    Args:
        a: The first one.
        b: The second one.

    Returns:
        Their sum.
    """
    return a + b


class Sums:
    """An environment as TRL has them: an instance for each attempt, whose methods are tools."""

    def reset(self, **row: object) -> None:
        """Forget nothing: there is no state."""

    def add(self, a: int, b: int) -> int:
        """
        The sum of two numbers.

        Args:
            a: The first one.
            b: The second one.

        Returns:
            Their sum.
        """
        return a + b


class ToolMeter(Meter):
    """A meter of the sampled tokens alone, and of turns."""

    def clear(self) -> None:
        super().clear()
        self.turns = 0

    def count_turns(self, completions: list[list[dict]], rewards: list[float]) -> None:
        self.turns += sum(message["role"] == "assistant" for messages in completions for message in messages)
        self.reward += sum(rewards)

    def count_tokens(self, tool_mask: list[list[int]]) -> None:
        """Count the sampled tokens. `tool_mask`: 1 for each token that was sampled, 0 for those of tools."""
        lengths = [sum(mask) for mask in tool_mask]
        self.samples += len(lengths)
        self.tokens += sum(lengths)
        self.longest = max(self.longest, *lengths)

    def report(self, seconds: float) -> dict:
        return super().report(seconds) | {"turns": self.turns}


class ToolTrainer(TimedTrainer):
    def _generate(self, *args, **kwargs):
        generated = super()._generate(*args, **kwargs)
        _, _, tool_mask, *_ = generated
        self._meter.count_tokens(tool_mask)
        return generated


def train(arguments: argparse.Namespace, channel: Channel) -> None:
    torch.set_num_threads(arguments.threads)
    meter = ToolMeter()
    settings = {name: getattr(arguments, name) for name in SETTINGS}
    directory = tempfile.mkdtemp(prefix="trl_tools_")

    def reward(completions: list[list[dict]], answer: list[str], **_: object) -> list[float]:
        rewards = [
            float(messages[-1]["content"].lstrip(".") == right)
            for messages, right in zip(completions, answer, strict=True)
        ]
        meter.count_turns(completions, rewards)
        return rewards

    # Not AutoTokenizer: from the model's type it may pick a class whose pre-tokenizer is not the one in the file.
    tokenizer = PreTrainedTokenizerFast.from_pretrained(arguments.model, padding_side="left")
    tokenizer.response_template = RESPONSE_TEMPLATE
    trainer = ToolTrainer(
        meter,
        model=AutoModelForCausalLM.from_pretrained(
            arguments.model, dtype=torch.float32, attn_implementation=arguments.attention
        ),
        reward_funcs=reward,
        args=make_config(arguments, directory),
        train_dataset=Dataset.from_list(read_rows(arguments.prompts)),
        processing_class=tokenizer,
        callbacks=[Rounds(channel, meter, settings, directory)],
        **({"tools": [add]} if arguments.way == "tools" else {"environment_factory": Sums}),
    )
    try:
        trainer.train()
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def read_rows(file: str) -> list[dict]:
    with open(file, encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines if line.strip()]
    return [row | {"prompt": [{"role": "user", "content": row["prompt"]}]} for row in rows]

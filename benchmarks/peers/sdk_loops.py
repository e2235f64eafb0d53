"""GRPO loops through the SDK `tinker` against `penstock serve`, driven round by round: the same protocol as
`penstock_grpo.py`, with `clients` in a request for the number of loops at the same time, and `prompts` for those of a
step.

Each loop has an adapter of its own, in a thread of this process, of the layers that `penstock run` adapts: not of the
output layer. A step samples a group for each prompt, rewards digits, trains on centred rewards by importance sampling,
steps, and saves weights to sample from.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peers.channel import Channel

NUM_PROMPTS, GROUP = 8, 8
RATE = 1e-8
KEY = "tml-benchmark"
START_S, END_S = 300.0, 120.0


class Loop:
    """One client's loop."""

    def __init__(self, url: str, prompts: list[list[int]], rank: int, max_tokens: int, model: str) -> None:
        import tinker
        from tinker import types

        self._types, self._prompts, self._max_tokens = types, prompts, max_tokens
        self._digits = {token for token, text in _texts(model).items() if text.isdigit()}
        self._service = tinker.ServiceClient(base_url=url, api_key=KEY)
        self._training = self._service.create_lora_training_client(base_model="model", rank=rank, train_unembed=False)
        self._number = 0

    def steps(self, count: int, num_prompts: int = NUM_PROMPTS) -> dict[str, float]:
        """Make steps. Returns samples, and the tokens that were sampled and trained."""
        samples = tokens = 0
        for _ in range(count):
            num_samples, num_tokens = self._step(num_prompts)
            samples, tokens = samples + num_samples, tokens + num_tokens
        return {"samples": samples, "tokens": tokens}

    def _step(self, num_prompts: int) -> tuple[int, int]:
        types, first = self._types, self._number * num_prompts
        prompts = [self._prompts[(first + index) % len(self._prompts)] for index in range(num_prompts)]
        self._number += 1
        sampler = self._training.save_weights_and_get_sampling_client().result()
        params = types.SamplingParams(max_tokens=self._max_tokens, temperature=1.0)
        futures = [sampler.sample(types.ModelInput.from_ints(prompt), GROUP, params) for prompt in prompts]
        data, num_tokens = [], 0
        for prompt, future in zip(prompts, futures, strict=True):
            sequences = future.result().sequences
            rewards = [sum(token in self._digits for token in one.tokens) / len(one.tokens) for one in sequences]
            mean = sum(rewards) / GROUP
            for one, reward in zip(sequences, rewards, strict=True):
                data.append(self._datum(prompt, one, reward - mean))
                num_tokens += len(one.tokens)
        backward = self._training.forward_backward(data, "importance_sampling")
        optim = self._training.optim_step(types.AdamParams(learning_rate=RATE))
        backward.result()
        optim.result()
        return len(data), num_tokens

    def _datum(self, prompt: list[int], one: Any, advantage: float) -> Any:
        before, tokens = len(prompt) - 1, one.tokens
        zeros = np.zeros(before, np.float32)
        return self._types.Datum(
            model_input=self._types.ModelInput.from_ints([*prompt, *tokens[:-1]]),
            loss_fn_inputs={
                "target_tokens": np.array([0] * before + tokens, np.int64),
                "logprobs": np.concatenate([zeros, np.asarray(one.logprobs, np.float32)]),
                "advantages": np.concatenate([zeros, np.full(len(tokens), advantage, np.float32)]),
            },
        )


class Served:
    """A server in a process of its own, and loops as many as were asked for so far."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._arguments = arguments
        self._prompts = _prompts(arguments.model, arguments.prompts)
        words = [f"model.path={arguments.model}", f"output_dir={arguments.output_dir}", *arguments.overrides]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "penstock.cli.main", "serve", *words, "--port", "0"],
            stdout=subprocess.PIPE, text=True, start_new_session=True, env=os.environ | {"TINKER_API_KEY": KEY},
        )  # fmt: skip
        assert self._process.stdout is not None
        told = next(line for line in self._process.stdout if "TINKER_BASE_URL=" in line)
        self._url = told.partition("TINKER_BASE_URL=")[2].split()[0]
        self._loops: list[Loop] = []
        self._threads = ThreadPoolExecutor(64)

    def round(self, num_steps: int, num_clients: int, num_prompts: int) -> dict[str, float]:
        """Run so many loops at the same time, each for so many steps of so many prompts."""
        while len(self._loops) < num_clients:
            loop = Loop(
                self._url, self._prompts, self._arguments.rank, self._arguments.max_new_tokens, self._arguments.model
            )
            loop.steps(1, 1)
            self._loops.append(loop)
        began = time.perf_counter()
        running = [self._threads.submit(loop.steps, num_steps, num_prompts) for loop in self._loops[:num_clients]]
        found = [one.result() for one in running]
        seconds = time.perf_counter() - began
        return {"seconds": seconds, **{name: sum(one[name] for one in found) for name in ("samples", "tokens")}}

    def close(self) -> None:
        self._process.send_signal(signal.SIGTERM)
        self._process.wait(END_S)


def _prompts(model: str, file: str) -> list[list[int]]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    texts = [json.loads(line)["prompt"] for line in Path(file).read_text().splitlines()]
    return [tokenizer.encode(text) for text in texts]


def _texts(model: str) -> dict[int, str]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    return {token: text for text, token in tokenizer.get_vocab().items()}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--prompts", required=True)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--output-dir", required=True)
    parser.add_argument("overrides", nargs="*", help="settings of the server")
    return parser.parse_args()


def main() -> None:
    channel = Channel()
    served = Served(parse_arguments())
    try:
        channel.send({"ready": True})
        for request in channel.requests():
            channel.send(
                served.round(
                    int(request["steps"]), int(request.get("clients", 1)), int(request.get("prompts", NUM_PROMPTS))
                )
            )
    finally:
        served.close()


if __name__ == "__main__":
    main()

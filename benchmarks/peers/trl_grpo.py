#!/usr/bin/env python3
"""TRL's GRPOTrainer on the end-to-end benchmark's workload, driven round by round.

Run it with the Python of the environment that `requirements/trl.lock` describes. It imports nothing of this
project: the benchmark starts it as a child process and talks to it in lines of JSON, so that rounds of several
systems can alternate on one machine.

    out  {"ready": true, ...}           the model is loaded, `train()` is running and waits before its first step
    in   {"steps": K}                   run K optimizer steps
    out  {"seconds": s, "samples": n, "tokens": t, "step_seconds": [...], ...}
    in   (end of file)                  stop

One step is: take the next prompts of the file, sample completions of each, score them by the rule below, and make
one AdamW update from all of them. Between rounds the process sleeps in a read of its standard input.

The rule: the share of digits among the characters of the completion's text; 0 for an empty one.

Workloads:
    fixed         every completion has exactly --max-new-tokens tokens; the end-of-sequence token is forbidden
    long_tailed   a completion ends where the model samples the end-of-sequence token, or at --max-new-tokens

`seconds` runs from the reading of the request to the end of its last step, so it holds everything that the trainer
does between steps too. `tokens` are the sampled ones, an end-of-sequence token included. What TRL itself prints goes
to standard error. Settings which only change TRL's speed are options; the defaults are the fastest of those tried.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time

# The fastest settings found for each workload, used where an option is not given. Transformers' continuous batching
# took 2 (long_tailed) to 6 times (fixed) the processor time of its plain generate, and ignores min_new_tokens;
# torch.compile gained nothing. Neither is offered here.
FASTEST = {
    "fixed": {"micro_batch": 16, "attention": "sdpa", "cache": "dynamic", "optimizer": "adamw_torch_fused"},
    "long_tailed": {"micro_batch": 16, "attention": "sdpa", "cache": "dynamic", "optimizer": "adamw_torch_fused"},
}


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="TRL's GRPOTrainer on the end-to-end benchmark's workload.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--model", required=True, help="directory of the model and its tokenizer")
    parser.add_argument("--prompts", required=True, help='JSON lines, each with a "prompt" string')
    parser.add_argument("--workload", choices=sorted(FASTEST), default="fixed")
    parser.add_argument("--prompts-per-step", type=int, default=8)
    parser.add_argument("--samples-per-prompt", type=int, default=8)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2, help="threads of torch")
    parser.add_argument("--learning-rate", type=float, default=1e-8)
    parser.add_argument("--seed", type=int, default=0)
    speed = parser.add_argument_group("settings which only change the speed (default: the fastest for the workload)")
    speed.add_argument("--micro-batch", type=int, help="samples in one forward and backward pass")
    speed.add_argument("--attention", choices=("sdpa", "eager"))
    speed.add_argument("--cache", choices=("dynamic", "static"), help="key-value cache of transformers' generate")
    speed.add_argument("--optimizer", choices=("adamw_torch", "adamw_torch_fused"))
    arguments = parser.parse_args(argv)
    for name, value in FASTEST[arguments.workload].items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, value)
    samples = arguments.prompts_per_step * arguments.samples_per_prompt
    arguments.micro_batch = min(arguments.micro_batch, samples)
    if samples % arguments.micro_batch:
        parser.error(f"--micro-batch must divide the {samples} samples of a step")
    return arguments


def digit_share(completions: list[str], **_: object) -> list[float]:
    """The reward: the share of digits among a completion's characters."""
    return [sum("0" <= c <= "9" for c in text) / len(text) if text else 0.0 for text in completions]


class Protocol:
    """Lines of JSON on what were standard input and output when the program started."""

    def __init__(self) -> None:
        # Nothing else may write to the channel: file descriptor 1 becomes standard error.
        self._out = os.fdopen(os.dup(1), "w", buffering=1)
        os.dup2(2, 1)
        sys.stdout = sys.stderr
        self._in = sys.stdin

    def send(self, message: dict) -> None:
        self._out.write(json.dumps(message) + "\n")
        self._out.flush()

    def receive(self) -> dict | None:
        for line in iter(self._in.readline, ""):
            if line.strip():
                return json.loads(line)
        return None


class Meter:
    """What was done in the current round. The trainer's hooks feed it."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.samples = 0
        self.tokens = 0
        self.longest = 0
        self.reward = 0.0
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
            "samples": self.samples,
            "tokens": self.tokens,
            "step_seconds": self.step_seconds,
            "generation_seconds": self.generation_seconds,
            "reward_mean": self.reward / max(self.samples, 1),
            "longest": self.longest,
        }


def main(argv: list[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    # Before torch and transformers are imported: they read these once.
    os.environ["OMP_NUM_THREADS"] = str(arguments.threads)
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    protocol = Protocol()

    import torch
    import transformers
    import trl
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, TrainerCallback

    torch.set_num_threads(arguments.threads)

    # Not AutoTokenizer: from the model's type it may pick a class whose pre-tokenizer is not the one in the file.
    tokenizer = PreTrainedTokenizerFast.from_pretrained(arguments.model, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(
        arguments.model, dtype=torch.float32, attn_implementation=arguments.attention
    )
    with open(arguments.prompts, encoding="utf-8") as file:
        prompts = [json.loads(line)["prompt"] for line in file if line.strip()]

    samples = arguments.prompts_per_step * arguments.samples_per_prompt
    accumulation = samples // arguments.micro_batch
    generation = {"min_new_tokens": arguments.max_new_tokens} if arguments.workload == "fixed" else {}
    meter = Meter()

    def reward(completions: list[str], completion_ids: list[list[int]], **_: object) -> list[float]:
        rewards = digit_share(completions)
        meter.count(completion_ids, rewards)
        return rewards

    class Rounds(TrainerCallback):
        """Holds the training between rounds, inside the callback that ends a step."""

        def __init__(self) -> None:
            self.left = 0

        def on_step_begin(self, args, state, control, **kwargs):
            if state.global_step == 0 and not self.left:  # the first step of all
                protocol.send(
                    {
                        "ready": True,
                        "versions": {m.__name__: m.__version__ for m in (trl, transformers, torch)},
                        "settings": {
                            name: getattr(arguments, name)
                            for name in ("workload", "threads", "micro_batch", "attention", "cache", "optimizer")
                        },
                    }
                )
                if not self.wait():
                    finish()
            return control

        def on_step_end(self, args, state, control, **kwargs):
            now = time.perf_counter()
            meter.step_seconds.append(now - self.last)
            self.last = now
            self.left -= 1
            if not self.left:
                protocol.send(meter.report(now - self.start))
                if not self.wait():
                    control.should_training_stop = True
            return control

        def wait(self) -> bool:
            while True:
                request = protocol.receive()
                if request is None:
                    return False
                if int(request["steps"]) > 0:
                    break
                protocol.send(Meter().report(0.0))
            self.left = int(request["steps"])
            meter.clear()
            self.start = self.last = time.perf_counter()
            return True

    class TimedTrainer(trl.GRPOTrainer):
        def _generate_single_turn(self, *args, **kwargs):
            start = time.perf_counter()
            result = super()._generate_single_turn(*args, **kwargs)
            meter.generation_seconds.append(time.perf_counter() - start)
            return result

    directory = tempfile.mkdtemp(prefix="trl_grpo_")

    def finish() -> None:
        """Leaves at once when no step was ever asked for: there is no callback by which to cancel a begun step."""
        shutil.rmtree(directory, ignore_errors=True)
        os._exit(0)

    config = trl.GRPOConfig(
        output_dir=directory,
        # The workload.
        per_device_train_batch_size=arguments.micro_batch,
        gradient_accumulation_steps=accumulation,  # also TRL's steps_per_generation: all samples of a step are fresh
        num_generations=arguments.samples_per_prompt,
        max_completion_length=arguments.max_new_tokens,
        temperature=1.0,
        generation_kwargs=generation,
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
        cache_implementation=None if arguments.cache == "dynamic" else arguments.cache,
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
    trainer = TimedTrainer(
        model=model,
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        processing_class=tokenizer,
        callbacks=[Rounds()],
    )
    try:
        trainer.train()
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

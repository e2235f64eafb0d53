"""TRL's GRPOTrainer on a task with a tool, in TRL's own way of doing that, driven round by round.

It has the protocol of `trl_grpo.py`; an answer also has `turns`, those of all attempts. Of this project it imports its
neighbours alone.

TRL is given a class (`environment_factory`), whose methods are tools, and reads the calls in what the model says by
the tokenizer's `response_template`, as it does for models that it knows. Every turn is one call of transformers'
generate for all attempts that have one, which ends with the longest; then their tools are called, one after the other.
"""

from __future__ import annotations

import argparse
import os

from benchmarks.peers.channel import Channel


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="TRL's GRPOTrainer on a task with a tool.", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--model", required=True, help="directory of the model and its tokenizer")
    parser.add_argument("--prompts", required=True, help='JSON lines, each with "prompt" and "answer"')
    parser.add_argument("--prompts-per-step", type=int, default=8)
    parser.add_argument("--samples-per-prompt", type=int, default=8)
    parser.add_argument("--max-new-tokens", type=int, default=512, help="of an attempt, what tools say included")
    parser.add_argument("--threads", type=int, default=2, help="threads of torch")
    parser.add_argument("--learning-rate", type=float, default=1e-8)
    parser.add_argument("--seed", type=int, default=0)
    speed = parser.add_argument_group("settings which only change the speed (default: the fastest of those tried)")
    speed.add_argument("--way", choices=("environment", "tools"), default="environment", help="how TRL has the tool")
    speed.add_argument("--micro-batch", type=int, default=16, help="samples in one forward and backward pass")
    speed.add_argument("--attention", choices=("sdpa", "eager"), default="sdpa")
    speed.add_argument("--cache", choices=("dynamic", "static"), default="dynamic")
    speed.add_argument("--optimizer", choices=("adamw_torch", "adamw_torch_fused"), default="adamw_torch_fused")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    arguments.workload, arguments.engine = "long_tailed", "generate"  # an end-of-sequence token ends a turn
    # Before torch and transformers are imported: they read these once.
    os.environ |= {
        "OMP_NUM_THREADS": str(arguments.threads),
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TRL_EXPERIMENTAL_SILENCE": "1",
    }
    channel = Channel()
    from benchmarks.peers.trl_tool_rounds import train

    train(arguments, channel)


if __name__ == "__main__":
    main()

"""TRL's GRPOTrainer on the end-to-end benchmark's workload, driven round by round.

It runs with the Python of the environment that `requirements/trl.lock` describes, so of this project it imports its
neighbours alone: `channel.py`, and `trl_rounds.py`, which trains.

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

Engines:
    generate      transformers' generate: all samples of a step until the longest ends
    continuous    transformers' continuous batching, its cache sized for the workload: by itself it takes half of the
                  machine's memory, and touches all of it at every step
    vllm          vLLM in TRL's own process (`vllm_mode="colocate"`), never given new weights: a bound, of TRL if
                  loading cost nothing. TRL hands each weight to the model that vLLM has built; the CPU build has
                  repacked them and put empty ones in their place, so that the first one ends in "AttributeError:
                  'Parameter' object has no attribute 'weight_loader'". TRL's second forward pass, which corrects for
                  an engine that differs, is left out. `--vllm-from` has what TRL's environment lacks
"""

from __future__ import annotations

import argparse
import os
import sys
import sysconfig

from benchmarks.peers.channel import Channel

# The fastest settings found for each workload, used where an option is not given. torch.compile gained nothing, and is
# not offered here.
FASTEST = {
    "fixed": {"micro_batch": 16, "attention": "sdpa", "cache": "dynamic", "optimizer": "adamw_torch_fused"},
    "long_tailed": {"micro_batch": 16, "attention": "sdpa", "cache": "dynamic", "optimizer": "adamw_torch_fused"},
}


def parse_arguments() -> argparse.Namespace:
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
    parser.add_argument("--engine", choices=("generate", "continuous", "vllm"), default="generate")
    parser.add_argument("--vllm-from", help="site-packages with vLLM and the same torch and transformers")
    speed = parser.add_argument_group("settings which only change the speed (default: the fastest for the workload)")
    speed.add_argument("--micro-batch", type=int, help="samples in one forward and backward pass")
    speed.add_argument("--attention", choices=("sdpa", "eager"))
    speed.add_argument("--cache", choices=("dynamic", "static"), help="key-value cache of transformers' generate")
    speed.add_argument("--page-tokens", type=int, default=32, help="of a page of the continuous engine's cache")
    speed.add_argument("--batch-tokens", type=int, default=1024, help="of one forward pass of the continuous engine")
    speed.add_argument("--optimizer", choices=("adamw_torch", "adamw_torch_fused"))
    arguments = parser.parse_args()
    for name, value in FASTEST[arguments.workload].items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, value)
    samples = arguments.prompts_per_step * arguments.samples_per_prompt
    arguments.micro_batch = min(arguments.micro_batch, samples)
    if samples % arguments.micro_batch:
        parser.error(f"--micro-batch must divide the {samples} samples of a step")
    return arguments


def main() -> None:
    arguments = parse_arguments()
    # Before torch and transformers are imported: they read these once.
    os.environ |= {
        "OMP_NUM_THREADS": str(arguments.threads),
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
    }
    if arguments.vllm_from:
        sys.path.append(arguments.vllm_from)
        # vLLM looks at models in a process of its own, which has the same two, in the same order.
        os.environ["PYTHONPATH"] = os.pathsep.join([sysconfig.get_path("purelib"), arguments.vllm_from])
    channel = Channel()
    from benchmarks.peers.trl_rounds import train

    train(arguments, channel)


if __name__ == "__main__":
    main()

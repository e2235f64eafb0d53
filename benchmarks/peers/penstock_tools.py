"""Penstock's GRPO on the task with a tool, driven round by round: the same protocol as `trl_tools.py`, and the same
gate as `penstock_grpo.py`. An ordinary run with an environment."""

import argparse
from pathlib import Path

from benchmarks.agents import sums
from benchmarks.peers.channel import Channel
from benchmarks.peers.penstock_grpo import drive


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--model", required=True)
    parser.add_argument("--prompts", required=True)
    parser.add_argument("--prompts-per-step", type=int, default=8)
    parser.add_argument("--max-new-tokens", type=int, default=512, help="sampled tokens of an attempt")
    parser.add_argument("--max-staleness", type=int, default=0)
    parser.add_argument("--output-dir", required=True)
    parser.add_argument("overrides", nargs="*", help="settings which only change the speed, and others to try")
    arguments = parser.parse_args()
    channel = Channel()
    words = [
        f"model.path={arguments.model}", "data.source=jsonl", f"data.path={arguments.prompts}",
        "data.columns.prompt=prompt", "data.columns.answer=answer",
        f"environment.name={Path(sums.__file__).resolve()}:Sums", "environment.gateway.tools=hermes",
        f"environment.max_tokens={arguments.max_new_tokens}",
        f"rollout.sampling.max_tokens={arguments.max_new_tokens}",
        "rollout.max_model_len=1024", "rollout.kv_cache_gib=0.5",
        "trainer.max_steps=1000000", f"trainer.groups_per_step={arguments.prompts_per_step}",
        "algorithm.group_size=8", "trainer.optimizer.lr=1e-8",
        f"max_staleness={arguments.max_staleness}", f"output_dir={arguments.output_dir}",
        "tracking.samples_every_steps=0", "tracking.export_model=false", "tracking.progress=false",
    ]  # fmt: skip
    drive([*words, *arguments.overrides], channel)


if __name__ == "__main__":
    main()

"""Penstock's GRPO on the end-to-end benchmark's workload, driven round by round: the same protocol as `trl_grpo.py`.

The run is an ordinary one. Its only guest is a sink that, when a round's steps are logged, answers on standard output
and blocks until the next request. While it blocks, an asynchronous run finishes what its credits allow and then idles;
what it has thus made in advance is used up by the first steps of the next round, which are not measured
(`SETTLE_STEPS`). The learning rate is next to nothing on all sides: the policy, and with it the length of responses,
stays the same from round to round.
"""

import argparse
import time
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.peers.channel import Channel
from penstock.conf.errors import PenstockError
from penstock.orchestrator.configuration.compose import load_config
from penstock.orchestrator.run import run

WARMUP_STEPS = 3
SETTLE_STEPS = 3
"""Number of steps that are not measured: more than `max_staleness` + 1, so that the measured ones are in the steady
state."""
PHASES = ("rollout", "reward", "compute", "train", "publish")


class EndOfBenchmark(PenstockError):
    """The end of standard input: the run is no longer needed."""


class Gate:
    """A sink that lets steps through on request."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._left = WARMUP_STEPS
        self._last = 0.0
        self._steps: list[dict[str, float]] | None = None

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        now = time.perf_counter()
        if self._steps is not None and self._left <= self._measured:
            samples = metrics["perf/samples_per_s"] * metrics["timing_s/step"]
            tokens, turns = (metrics.get(f"{name}/mean", 1.0) * samples for name in ("response_length", "turns"))
            seconds = {phase: metrics.get(f"timing_s/{phase}", 0.0) for phase in PHASES}
            self._steps.append({"seconds": now - self._last, "tokens": tokens, "turns": turns, **seconds})
        self._last = now
        self._left -= 1
        if self._left == 0:
            try:
                self._answer(metrics)
            except BrokenPipeError:  # of a sink it would cost the numbers alone
                raise EndOfBenchmark("nobody listens") from None
            self._wait()
            self._last = time.perf_counter()

    def _answer(self, metrics: Mapping[str, Any]) -> None:
        if self._steps is None:
            self._channel.send({"ready": True})
            return
        seconds = sum(step["seconds"] for step in self._steps)
        answer = {
            "seconds": seconds,
            "samples": round(len(self._steps) * metrics["perf/samples_per_s"] * metrics["timing_s/step"]),
            "tokens": round(sum(step["tokens"] for step in self._steps)),
            "turns": round(sum(step["turns"] for step in self._steps)),
            "reward_mean": metrics.get("reward/mean"),
            "step_seconds": [step["seconds"] for step in self._steps],
            "phases": {phase: [step[phase] for step in self._steps] for phase in PHASES},
            "staleness_max": metrics.get("staleness/max"),
            "mismatch": metrics.get("mismatch/logprob_abs_mean"),
        }
        self._channel.send(answer)

    def _wait(self) -> None:
        request = self._channel.receive()
        if request is None:
            raise EndOfBenchmark("no more rounds")
        self._measured = int(request["steps"])
        self._left = self._measured + int(request.get("settle", SETTLE_STEPS))
        self._steps = []

    def close(self) -> None:
        """Close nothing."""


def drive(words: list[str], channel: Channel) -> None:
    """Run an ordinary run with these settings, for as many rounds as are asked for."""
    try:
        run(load_config(words), sinks=[Gate(channel)], quiet=True)
    except EndOfBenchmark:
        return


def parse_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--model", required=True)
    parser.add_argument("--prompts", required=True)
    parser.add_argument("--workload", choices=("fixed", "long_tailed"), default="fixed")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--max-staleness", type=int, default=0)
    parser.add_argument("--output-dir", required=True)
    parser.add_argument("overrides", nargs="*", help="settings which only change the speed, and others to try")
    return parser.parse_args(words)


def words_of(arguments: argparse.Namespace) -> list[str]:
    """Settings of the run. What is not named is as by default, seeds of samples among it."""
    return [
        f"model.path={arguments.model}", "data.source=jsonl", f"data.path={arguments.prompts}",
        "data.columns.prompt=prompt", "data.columns.answer=null", "data.chat_template=false",
        "reward.function=digits", f"max_staleness={arguments.max_staleness}",
        "trainer.max_steps=1000000", "trainer.groups_per_step=8", "algorithm.group_size=8", "trainer.optimizer.lr=1e-8",
        f"rollout.sampling.max_tokens={arguments.max_new_tokens}",
        f"rollout.sampling.ignore_eos={str(arguments.workload == 'fixed').lower()}",
        f"output_dir={arguments.output_dir}",
        "tracking.samples_every_steps=0", "tracking.export_model=false", "tracking.progress=false",
        *arguments.overrides,
    ]  # fmt: skip


def main() -> None:
    arguments = parse_arguments()
    channel = Channel()
    drive(words_of(arguments), channel)


if __name__ == "__main__":
    main()

"""Samples a second while weights change, by what becomes of the sequences under way (`rollout.on_update`).

    .venv/bin/python -m benchmarks.updates_in_flight --json updates.json

On this CPU: two engines of vLLM, one thread each, decode long answers of a small fresh model. After each step's samples
both load a publication. The modes take turns on the same engines, and a figure is of all samples between the first load
and the last. Engines never lack groups, so nothing but loads sets the modes apart.

In the simulator: eight engines and eight ranks of a large model by the durations below, with the store's bound
(`max_staleness`), which `finish` needs more of.
"""

import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import torch

from benchmarks.harness import Target, new_table, parse_arguments, print_targets, show, spread, write_json
from penstock.conf.model import FreshModelConfig
from penstock.conf.rollout import ON_UPDATE, RolloutConfig
from penstock.metering.meters import Meters
from penstock.orchestrator.configuration.compose import load_config
from penstock.planner.durations import ConstantDurations, SyncSeconds
from penstock.planner.lengths import Lengths
from penstock.planner.simulation.simulated_members import SimulatedSamples
from penstock.planner.simulation.simulation import Simulation
from penstock.workers.fresh_model import build_fresh_model
from penstock.workers.protocols import EngineSpec, Publication, Sampling
from penstock.workers.rollout.engine_vllm import VllmEngine
from penstock.workers.weights.publication.layout import compute_layout
from penstock.workers.weights.publication.publication import PublicationWriter, seal

RECOMPUTE, KEEP, FINISH = ON_UPDATE
NUM_ENGINES, GROUPS, SAMPLES, PROMPT, MEDIAN, MOST = 2, 4, 4, 64, 300, 900
"""Groups of each engine at a time, samples of a group, tokens of a prompt, of the median answer, and of the longest."""
SPREAD = 0.6
"""Standard deviation of the logarithm of an answer's length."""
STEP_SAMPLES = 32
"""Samples after which the next version comes."""
CLEARLY = 1.03
"""Ratio to `recompute` from which on another mode is clearly better."""
LARGE = ConstantDurations(
    prefill_tokens_per_s=40_000, decode={1: 0.010, 64: 0.012, 256: 0.030}, context_s=4e-9, update_tokens_per_s=60_000,
    synced=SyncSeconds(1.0, 0.6, 0.1),
)  # fmt: skip
"""Seconds of an engine with a GPU of its own, about those of 7B; the pause is docs/internals/weights.md's."""
ANSWERS = {"1,000 tokens": 1_000, "8,000 tokens": 8_000}
"""Median answers of simulated runs."""


def length_of(group: int, sample: int) -> int:
    return min(MOST, round(MEDIAN * 2.718281828 ** (SPREAD * Random(f"{group}/{sample}").gauss(0, 1))))


class Engines:
    """Engines of vLLM that sample group after group. Lifecycle: `start`, then `round` any number of times, `close`."""

    def __init__(self, root: Path) -> None:
        model = root / "model"
        build_fresh_model(model, FreshModelConfig(num_layers=4, hidden_size=256, num_heads=4, num_kv_heads=2), seed=0)
        self._config = RolloutConfig(
            max_model_len=1024, kv_cache_gib=0.1, max_concurrent_samples=GROUPS * SAMPLES, start_timeout_s=900
        )
        spec = EngineSpec(self._config, str(model), num_threads=1, phase_timeout_s=600)
        self._engines = [VllmEngine(spec, Meters()) for _ in range(NUM_ENGINES)]
        self._root, self._version, self._group = root, 0, 0
        self._taking = [True] * NUM_ENGINES
        self._weights = self._read(model)

    @staticmethod
    def _read(model: Path) -> dict[str, torch.Tensor]:
        from safetensors.torch import load_file

        return load_file(model / "model.safetensors")

    async def start(self) -> None:
        for engine in self._engines:
            await engine.start()

    async def close(self) -> None:
        for engine in self._engines:
            await engine.close()

    async def round(self, mode: str, num_updates: int) -> dict[str, Any]:
        """Sample over so many updates. Returns samples a second, seconds of standstill a load, and tokens that were
        read twice."""
        self._config.on_update = mode
        self._done, self._more = 0, asyncio.Event()
        sampling = [asyncio.create_task(self._sample(index)) for index in range(NUM_ENGINES)]
        try:
            await self._until(STEP_SAMPLES)
            await self._update(mode)
            began, before, said = time.perf_counter(), self._done, [engine.sampled() for engine in self._engines]
            for _ in range(num_updates):
                target = self._done + STEP_SAMPLES
                await self._until(target)
                await self._update(mode)
            seconds, num_samples = time.perf_counter() - began, self._done - before
            now = [engine.sampled() for engine in self._engines]
        finally:
            for task in sampling:
                task.cancel()
            await asyncio.gather(*sampling, return_exceptions=True)
        paused = sum(new.paused_s - old.paused_s for new, old in zip(now, said, strict=True))
        again = sum(new.num_read_again - old.num_read_again for new, old in zip(now, said, strict=True))
        return {
            "mode": mode, "samples_per_s": num_samples / seconds, "num_updates": num_updates,
            "paused_s": paused / num_updates / NUM_ENGINES, "read_again": again / num_updates,
        }  # fmt: skip

    async def _sample(self, index: int) -> None:
        """Keep an engine full, unless it finishes what it has."""
        groups: set[asyncio.Task[None]] = set()
        try:
            while True:
                while len(groups) < GROUPS and self._taking[index]:
                    self._group += 1
                    groups.add(asyncio.create_task(self._answer(index, self._group)))
                if groups:
                    done, groups = await asyncio.wait(groups, timeout=0.05, return_when=asyncio.FIRST_COMPLETED)
                    for task in done:
                        task.result()
                else:
                    await asyncio.sleep(0.005)
        finally:
            for task in groups:
                task.cancel()
            await asyncio.gather(*groups, return_exceptions=True)

    async def _answer(self, index: int, group: int) -> None:
        """Sample a group, each answer of a length of its own."""
        prompt = [20 + Random(f"{group}/{place}").randrange(60) for place in range(PROMPT)]
        asked = [
            Sampling(max_tokens=length_of(group, one), ignore_eos=True, seed=group + one) for one in range(SAMPLES)
        ]
        for answer in asyncio.as_completed([self._engines[index].generate(prompt, 1, one) for one in asked]):
            await answer
            self._done += 1
            self._more.set()

    async def _until(self, num_samples: int) -> None:
        while self._done < num_samples:
            self._more.clear()
            await self._more.wait()

    async def _update(self, mode: str) -> None:
        """Publish another version, and have both engines load it: at once, or one after the other has finished."""
        publication = await asyncio.to_thread(self._publish)
        if mode != FINISH:
            await asyncio.gather(*(engine.load(publication) for engine in self._engines))
            return
        for index, engine in enumerate(self._engines):
            self._taking[index] = False
            while engine.num_in_flight:
                await asyncio.sleep(0.005)
            await engine.load(publication)
            self._taking[index] = True

    def _publish(self) -> Publication:
        self._version += 1
        layout = compute_layout((name, tensor.shape, "float32") for name, tensor in self._weights.items())
        writer = PublicationWriter(str(self._root), self._version, layout)
        for name, tensor in self._weights.items():
            writer.write_elements(name, 0, tensor.reshape(-1))
        writer.finish()
        return seal(str(self._root), self._version, layout)


async def measure(num_rounds: int, num_updates: int) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory(prefix="updates-", dir="/dev/shm") as root:
        engines = Engines(Path(root))
        await engines.start()
        try:
            await engines.round(RECOMPUTE, 1)
            rounds = []
            for number in range(num_rounds):
                first = number % len(ON_UPDATE)
                for mode in ON_UPDATE[first:] + ON_UPDATE[:first]:
                    rounds.append(await engines.round(mode, num_updates))
                    print(rounds[-1], file=sys.stderr, flush=True)
            return rounds
        finally:
            await engines.close()


def simulated(median: int, max_staleness: int, mode: str, num_steps: int = 60) -> float:
    """Samples a second of a simulated run."""
    config = load_config([
        "recipe=arithmetic", "rollout.engine=vllm", f"rollout.on_update={mode}", f"max_staleness={max_staleness}",
        "rollout.num_workers=8", "trainer.num_ranks=8", "rollout.max_concurrent_samples=128",
        f"trainer.max_steps={num_steps}", "trainer.groups_per_step=128", "algorithm.group_size=8",
        "evaluation.every_steps=0", f"rollout.max_model_len={8 * median}", f"rollout.sampling.max_tokens={7 * median}",
    ])  # fmt: skip
    lengths = Lengths.lognormal(median, 7 * median, SPREAD)
    samples = SimulatedSamples(partial(lengths.of, seed=1), prompt_tokens=200)
    return Simulation(config, LARGE, samples).run().samples_per_s


def rates(rounds: Sequence[dict[str, Any]], mode: str, name: str = "samples_per_s") -> list[float]:
    return [one[name] for one in rounds if one["mode"] == mode]


def ratio(rounds: Sequence[dict[str, Any]], mode: str) -> float:
    """The median of a mode's rate by that of `recompute` in the same round."""
    pairs = zip(rates(rounds, mode), rates(rounds, RECOMPUTE), strict=True)
    return statistics.median(other / first for other, first in pairs)


def print_rounds(rounds: Sequence[dict[str, Any]]) -> None:
    table = new_table("vLLM on this CPU: two engines, long answers", ["rollout.on_update"], [
        "samples/s", "by recompute", "standstill of an engine a load, s", "tokens read twice a load",
    ])  # fmt: skip
    for mode in ON_UPDATE:
        paused, again = (statistics.median(rates(rounds, mode, name)) for name in ("paused_s", "read_again"))
        table.add_row(
            mode, spread(rates(rounds, mode), 2), f"{ratio(rounds, mode):.2f}", f"{paused:.2f}", f"{again:,.0f}"
        )
    show(table)


def print_simulated(found: dict[str, dict[int, dict[str, float]]]) -> None:
    table = new_table(
        "Simulated: eight engines and eight ranks of 7B", ["median answer"], ["max_staleness", *ON_UPDATE]
    )
    for answer, by_staleness in found.items():
        for max_staleness, by_mode in by_staleness.items():
            table.add_row(answer, str(max_staleness), *(f"{by_mode[mode]:.1f} samples/s" for mode in ON_UPDATE))
    show(table, width=110)


def main() -> None:
    arguments = parse_arguments(__doc__)
    rounds = asyncio.run(measure(arguments.rounds or (1 if arguments.quick else 3), 2 if arguments.quick else 6))
    print_rounds(rounds)
    played = {
        answer: {bound: {mode: simulated(median, bound, mode) for mode in ON_UPDATE} for bound in (1, 4)}
        for answer, median in ANSWERS.items()
    }
    print_simulated(played)
    default = RolloutConfig().update_mode
    others = max(ratio(rounds, mode) for mode in ON_UPDATE if mode != default) / ratio(rounds, default)
    targets = [Target(f"the best other mode by the default, {default}", others, "x", "<=", CLEARLY)]
    print_targets(targets)
    write_json(arguments.json, "updates_in_flight", rounds, targets, simulated=played)


if __name__ == "__main__":
    main()

"""A run of the real controller over the simulated fleet, in this process.

    python -m benchmarks.controller.run '{"num_steps": 20}' [FILE]

prints what it cost as a line of JSON; FILE: a profile of the controller's thread, for `pstats`.
"""

import asyncio
import contextlib
import cProfile
import io
import json
import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import psutil
from rich.console import Console

from benchmarks.controller.calls import Caller
from benchmarks.controller.clock import run_fast
from benchmarks.controller.fleet import NAMESPACE, attach, make_fleet, plan_of
from benchmarks.controller.hosts import process_of, served_members, served_store
from benchmarks.controller.scale import Scale, flow_of
from penstock.algorithms.graph.dataflow import Dataflow
from penstock.conf.run import RunConfig
from penstock.orchestrator.cluster.fleet.fleet import Fleet
from penstock.orchestrator.cluster.owners import RunOwner
from penstock.orchestrator.control.controller import Controller, TrainingResult
from penstock.orchestrator.observability.reporting.progress import ProgressDisplay
from penstock.orchestrator.observability.reporting.sinks import JsonLines, TensorBoard
from penstock.orchestrator.recovery.takeover import Handover, RunState, identity_of, pack
from penstock.orchestrator.run_context import RunContext
from penstock.orchestrator.run_directory.run_directory import RunDirectory
from penstock.store.service.store_server import Endpoint

START_S = 600.0
WARM_STEPS = 3
"""Number of steps that are not counted: connections, first looks, caches."""
MOST_FILES = 16_384
"""Most files open at once: connections of all members, and those of their heartbeats."""


@dataclass(frozen=True)
class Reading:
    """Readings after a step."""

    step: int
    run_s: float
    """Seconds by the run's clock."""
    cpu_s: float
    """CPU seconds of this process."""
    thread_s: float
    """CPU seconds of the controller's thread."""
    rss_bytes: int
    store_cpu_s: float
    calls: dict[str, int]
    """Number of calls to actors so far, by method."""


@dataclass
class Readings:
    """A sink that reads the clocks."""

    caller: Caller
    store: psutil.Process | None
    """The store's process; None: it is in this process."""
    found: list[Reading] = field(default_factory=list)
    call_s: float = 0.0
    """CPU seconds that a call takes here by itself, in Ray's place."""
    process: psutil.Process = field(default_factory=psutil.Process)

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        now, store_s = asyncio.get_running_loop().time(), 0.0
        if self.store is not None:
            times = self.store.cpu_times()
            store_s = times.user + times.system
        self.found.append(
            Reading(step, now, time.process_time(), time.thread_time(), self.process.memory_info().rss, store_s,
                    dict(self.caller.counts))
        )  # fmt: skip

    def close(self) -> None: ...


def controller_of(
    fleet: Fleet, config: RunConfig, flow: Dataflow, directory: RunDirectory, readings: Readings
) -> Controller:
    """Make the controller as `training.py` does, on a cluster: with all that it writes and leaves to the next
    command."""
    progress = ProgressDisplay(config, "run", console=Console(file=io.StringIO(), quiet=True))
    identity = identity_of(config, flow, "node")

    def describe(owner: RunOwner) -> bytes:
        return pack(identity, RunState(NAMESPACE, "/model", {}, None, {}, fleet.state(owner)))

    sinks = [JsonLines(directory), TensorBoard(directory), readings]
    context = RunContext.of(config, fleet, directory, progress)
    return Controller(context, sinks, handover=Handover(fleet.owner, describe))


async def run_here(scale: Scale, output_dir: str, store: Endpoint, members: str, store_pid: int | None) -> Readings:
    """Run the controller's part: `members` is the path of their socket."""
    config = scale.config(output_dir)
    flow = flow_of(config)
    caller = await Caller.connect(members)
    fleet = make_fleet(config, flow, *plan_of(config, flow, scale), caller, store)
    directory = RunDirectory.create(config)
    readings = Readings(caller, psutil.Process(store_pid) if store_pid is not None else None)
    try:
        await attach(fleet, START_S)
        readings.call_s = await cost_of_calls(fleet)
        outcome: TrainingResult = await controller_of(fleet, config, flow, directory, readings).run()
        assert outcome.num_steps == scale.num_steps
    finally:
        caller.close()
        fleet.owner.detach()
        directory.close()
    return readings


async def cost_of_calls(fleet: Fleet) -> float:
    """CPU seconds of one call, by what calls of all engines take whose answers are not used."""
    engines = fleet.role("rollout")
    for _ in range(2):  # the first time is not counted
        began = time.process_time()
        await asyncio.gather(*(handle.progress.remote() for _, handle in engines))
        took_s = time.process_time() - began
    return took_s / len(engines)


def run_apart(scale: Scale, profile: cProfile.Profile | None = None) -> Readings:
    """Run with store and members in processes of their own."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (MOST_FILES, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    with tempfile.TemporaryDirectory(prefix="penstock-controller-") as folder, contextlib.ExitStack() as processes:
        store, pid = processes.enter_context(process_of(served_store, scale, folder, 1.0))
        members, _ = processes.enter_context(process_of(served_members, scale, folder, scale.speed))
        with profile or contextlib.nullcontext():
            return run_fast(partial(run_here, scale, folder, store, members, pid), scale.speed)


def summary(readings: Readings, scale: Scale) -> dict[str, Any]:
    """Costs of each step after the first ones."""
    found = readings.found
    first, last = found[WARM_STEPS - 1], found[-1]
    steps, run_s = last.step - first.step, last.run_s - first.run_s

    def each(value: Callable[[Reading], float]) -> float:
        return (value(last) - value(first)) / steps

    middle = next(one for one in found if one.step >= (first.step + last.step) // 2)
    cpu_ms = 1000 * each(lambda one: one.cpu_s)
    calls = {name: (count - first.calls.get(name, 0)) / steps for name, count in last.calls.items()}
    return {
        **asdict(scale),
        "step_s": run_s / steps,
        "cpu_ms": cpu_ms,
        "own_ms": cpu_ms - 1000 * sum(calls.values()) * readings.call_s,
        "call_us": 1e6 * readings.call_s,
        "thread_ms": 1000 * each(lambda one: one.thread_s),
        "store_cpu_ms": 1000 * each(lambda one: one.store_cpu_s),
        "share": each(lambda one: one.cpu_s) * steps / run_s,
        "own_share": (cpu_ms / 1000 - sum(calls.values()) * readings.call_s) * steps / run_s,
        "calls": {name: round(count, 2) for name, count in sorted(calls.items(), key=lambda item: -item[1])},
        "num_calls": sum(calls.values()),
        "rss_mib": [one.rss_bytes / 2**20 for one in found],
        "grown_mib": (last.rss_bytes - middle.rss_bytes) / 2**20,
    }


def main() -> None:
    scale = Scale(**json.loads(sys.argv[1]))
    profile = cProfile.Profile(time.thread_time) if len(sys.argv) > 2 else None
    readings = run_apart(scale, profile)
    if profile is not None:
        profile.dump_stats(sys.argv[2])
    print(json.dumps(summary(readings, scale)), flush=True)


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    main()

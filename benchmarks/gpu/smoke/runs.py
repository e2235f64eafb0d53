"""Steps that are whole runs of `penstock run`: colocated, over two GPUs, with a rank that dies and one that hangs."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from benchmarks.gpu.smoke.place import Failed, Place
from benchmarks.harness import ROOT
from penstock.orchestrator.run_directory.run_directory import RunDirectory

DEADLINE_S = 1800.0
"""Deadline of a run, which takes a minute or two."""
LOOK_S = 0.2
MAX_MISMATCH = 0.05
"""Largest mean |Δ log p| between trainer and engine on a step."""
RANK = "ray::Trainer"
"""Beginning of the titles of the ranks' processes."""


def words(place: Place, name: str, steps: int, share: float = 1.0, **options: object) -> list[str]:
    """Words of a run of seconds. `share`: of a GPU, for each rank and each engine."""
    gpus = share if place.has_gpu else 0
    set_here = {
        "name": name, "output_dir": place.folder, "model.path": place.model, "data.path": place.prompts(),
        "reward.function": "digits", "rollout.engine": "vllm",
        "rollout.max_model_len": 128, "rollout.sampling.max_tokens": 16, "rollout.kv_cache_gib": 0.1,
        "rollout.gpu_memory_utilization": 0.3, "rollout.num_gpus_per_worker": gpus,
        "trainer.num_gpus_per_rank": gpus, "trainer.max_steps": steps, "trainer.groups_per_step": 4,
        "algorithm.group_size": 4, "trainer.optimizer.lr": 1e-3,
    }  # fmt: skip
    given = {key.replace("__", "."): value for key, value in options.items()}
    return [f"{key}={value}" for key, value in (place.preset | set_here | given).items()]


def run(
    place: Place, name: str, arguments: list[str], meanwhile: Callable[[psutil.Process], None] | None = None
) -> None:
    """Run to the end, and look at what it has logged. Raises `Failed`."""
    log = place.folder / f"{name}.log"
    environment = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"}
    command = [sys.executable, "-m", "penstock.cli.main", "run", *arguments]
    with log.open("w") as output:
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT)
    try:
        if meanwhile is not None:
            meanwhile(psutil.Process(process.pid))
        status = process.wait(DEADLINE_S)
    except subprocess.TimeoutExpired:
        raise Failed(f"{name}: did not end within {DEADLINE_S:g} s:\n{_tail(log)}") from None
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait(120)
    if status:
        raise Failed(f"{name}: penstock run {' '.join(arguments)} ended with {status}:\n{_tail(log)}")
    lines = RunDirectory(place.folder / name).read_metrics()
    mismatch = max(float(line["mismatch/logprob_abs_mean"]) for line in lines if "mismatch/logprob_abs_mean" in line)
    if not mismatch <= MAX_MISMATCH:
        raise Failed(f"{name}: trainer and engine disagree by {mismatch:.3f} nats a token")
    place.say(f"{name}: {lines[-1]['step']} steps, trainer against engine {mismatch:.1e}")


def colocated(place: Place) -> None:
    """A run whose engine and rank take turns, with a checkpoint every step."""
    options = {"placement": "colocated", "checkpoint__every_steps": 1}
    run(place, "colocated", words(place, "colocated", 3, share=0.5, **options))
    if not list((place.folder / "colocated" / "checkpoints").glob("global_step_3*")):
        raise Failed("colocated: there is no checkpoint of the last step")
    if place.needs(1, "engines that sleep"):
        run(place, "offloaded", words(place, "offloaded", 3, share=0.5, trainer__offload="true", **options))


def several(place: Place) -> None:
    """An engine over two GPUs, two copies of the model (HSDP), and layers split over two ranks."""
    num_gpus = 3 if place.has_gpu else 0
    if place.has_gpu and not place.needs(2, "tensor parallelism and copies of the model"):
        return
    two = {"trainer__num_ranks": 2, "weights__transport": "shm"}
    if num_gpus <= place.num_gpus:  # two of the engine, one of the rank; on CPUs none
        run(place, "tp-engine", words(place, "tp-engine", 2, rollout__tensor_parallel_size=2))
    else:
        place.leave_out("an engine over two GPUs beside a rank (3 GPUs)")
    halves = 0.5
    run(place, "hsdp", words(place, "hsdp", 2, halves, trainer__shard_size=1, **two))
    run(place, "tp-trainer", words(place, "tp-trainer", 2, halves, trainer__tensor_parallel_size=2, **two))


def lost_ranks(place: Place) -> None:
    """A rank that is killed, and one that hangs: others take the place, and the run ends."""
    for name, number in (("killed", signal.SIGKILL), ("hangs", signal.SIGSTOP)):
        options = {"faults__heartbeat_s": 2, "faults__heartbeat_timeout_s": 20}
        directory = place.folder / name

        def disturb(command: psutil.Process, directory: Path = directory, number: signal.Signals = number) -> None:
            _wait_for_step(command, directory, 2)
            _ranks_of(command)[0].send_signal(number)

        run(place, name, words(place, name, 8, share=0.5, **options), disturb)


def _wait_for_step(command: psutil.Process, directory: Path, step: int) -> None:
    """Wait until a step is logged, or the command has ended."""
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline and command.is_running() and command.status() != psutil.STATUS_ZOMBIE:
        if (directory / "metrics.jsonl").exists() and len(RunDirectory(directory).read_metrics()) >= step:
            return
        time.sleep(LOOK_S)
    raise Failed(f"{directory.name}: ended before step {step}:\n{_tail(directory.parent / f'{directory.name}.log')}")


def _ranks_of(command: psutil.Process) -> list[psutil.Process]:
    found = [process for process in command.children(recursive=True) if " ".join(process.cmdline()).startswith(RANK)]
    if not found:
        raise Failed(f"no process of the run is called {RANK}…")
    return found


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-30:])

"""What runs say about plans: the records of one run, and trials of a few steps.

By what factors its engines and ranks were slower than the cost model says:

    samples/step_N.parquet  lengths of prompts and responses       (else metrics.jsonl: their mean and largest)
    metrics.jsonl           seconds in which engines and ranks worked, by step
    events.jsonl            bytes a second between nodes

The factors are those of the split that the run had, on GPUs of one kind. They are common to all plans: ten steps are
enough.

`penstock plan --probe N` tries plans:

    the best of each class ─▶ penstock run, a few steps ─▶ seconds a step, of its metrics.jsonl ─▶ the fastest is kept
                                      └▶ deadline, exit code ─▶ a failure with a name, and on with the next

Probes are ordinary runs, one after the other, in directories of their own, which stay: `penstock ui` shows them. They
neither evaluate nor keep checkpoints or a model, and no tracker hears of them.
"""

import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, mean, median
from typing import Any

from pyarrow import parquet
from rich.console import Console

from penstock.conf.errors import ConfigError, PenstockError, how_ended
from penstock.conf.run import RunConfig
from penstock.orchestrator.observability.link_speeds import LINK
from penstock.orchestrator.run_directory.run_directory import RunDirectory
from penstock.planner.candidates import Candidate, with_keys
from penstock.planner.hardware import GpuKind
from penstock.planner.lengths import SIGMA, Lengths, Turns
from penstock.planner.search import Plan, Search

SETTLED = 2
"""First steps that are left out: compilation and warming up."""
SPLIT = (
    "placement", "max_staleness", "algorithm.group_size", "algorithm.epochs_per_batch",
    *(f"rollout.{key}" for key in (
        "engine", "num_workers", "num_threads", "tensor_parallel_size", "num_gpus_per_worker", "dtype",
        "max_concurrent_samples", "max_model_len", "gpu_memory_utilization",
    )),
    *(f"trainer.{key}" for key in (
        "num_ranks", "num_threads", "num_gpus_per_rank", "tensor_parallel_size", "sequence_parallel_size",
        "shard_size", "offload", "dtype", "groups_per_step", "num_minibatches", "max_tokens_per_microbatch",
        "activation_checkpointing", "activation_offload",
    )),
)  # fmt: skip
"""Keys of a run that its seconds depend on."""
COMMAND = (sys.executable, "-m", "penstock.cli.main", "run")
STEPS = 5
"""Steps that count, after those that fill the pipeline, compile and warm up. Plans whose difference is within the
variation of their mean are equally good."""
START_S, TIMES = 900.0, 10
"""Default deadline of a probe: seconds for its start, and the factor by which its steps may exceed the prediction."""
GRACE_S = 60.0
"""Seconds for a run to end in order after its deadline; then it is killed."""


@dataclass(frozen=True)
class Pilot:
    """A run's records."""

    place: str
    """Its directory."""
    keys: dict[str, Any]
    """Those of `SPLIT`."""
    lengths: Lengths
    engines_s: float
    """Seconds of a step in which engines worked, the median of steps."""
    ranks_s: float
    """Seconds of an update."""
    step_s: float
    """Mean seconds of a step."""
    num_steps: int
    link: float | None = None
    """Bytes a second of the slowest link between nodes; None: none was measured."""

    @property
    def has_gpus(self) -> bool:
        return bool(self.keys.get("trainer.num_gpus_per_rank") and self.keys.get("rollout.num_gpus_per_worker"))


def read_pilot(place: str) -> Pilot:
    """Read the records of a run's directory. Raises `ConfigError` where it has too few steps."""
    try:
        directory = RunDirectory.open(Path(place))
        lines = [line for line in directory.read_metrics() if line.get("step", 0) > SETTLED]
        values = directory.read_config()
    except (OSError, PenstockError) as error:
        raise ConfigError(f"--from {place}: no run's records can be read there ({error}).") from None
    steps = [line for line in lines if {"timing_s/step", "timing_s/train", "idle/rollout"} <= line.keys()]
    if not steps:
        raise ConfigError(f"--from {place}: it has no steps after the first {SETTLED}. Let it make ten.")
    found = {key: value for key in SPLIT if (value := value_at_key(values, key)) is not None}
    engines = median(line["timing_s/step"] * (1 - line["idle/rollout"]) for line in steps)
    ranks = median(line["timing_s/train"] for line in steps)
    step_s = mean(line["timing_s/step"] for line in steps)
    rates = [float(event["bytes_per_s"]) for event in directory.read_events() if event["kind"] == LINK]
    link = min(rates, default=None)
    return Pilot(place, found, _lengths(directory, steps), engines, ranks, step_s, len(steps), link)


def calibrated(search: Search, pilot: Pilot) -> Search:
    """The search with the run's lengths, and with its factors where it ran on GPUs of the cluster's kind."""
    search = replace(search, lengths=pilot.lengths, link=pilot.link)
    kinds = {nodes.kind for nodes in search.cluster}
    if not pilot.has_gpus or len(kinds) > 1:
        return search
    engines, ranks = _factors(search, pilot, kinds.pop())
    rates = search.efficiencies
    rates = replace(rates, decode_factor=rates.decode_factor * engines, update_factor=rates.update_factor * ranks)
    return replace(search, efficiencies=rates)


def _factors(search: Search, pilot: Pilot, kind: GpuKind) -> tuple[float, float]:
    """Measured over estimated seconds of engines and ranks."""
    base = with_keys(search.base, pilot.keys)
    count = int(pilot.keys["rollout.num_workers"])
    candidate = Candidate((), ((kind, count),), kind, 0)
    try:
        plan = replace(search, base=base).plan(candidate)
    except PenstockError as error:
        raise ConfigError(f"--from: what the run did could not be done by the cost model: {error}") from None
    return pilot.engines_s / plan.found.busy_s, pilot.ranks_s / plan.found.update_s


def _lengths(directory: RunDirectory, steps: Sequence[dict[str, Any]]) -> Lengths:
    responses, prompts = list[int](), list[int]()
    for file in directory.sample_files()[-10:]:
        columns = {"prompt_ids", "response_ids"} & set(parquet.read_schema(file).names)
        table = parquet.read_table(file, columns=sorted(columns)).to_pydict()
        prompts += map(len, table.get("prompt_ids", ()))
        responses += map(len, table["response_ids"])
    if responses:
        found = Lengths.recorded(responses, round(mean(prompts)) if prompts else 0)
    else:
        usual = median(line["response_length/mean"] for line in steps)
        longest = max(line["response_length/max"] for line in steps)
        found = Lengths.lognormal(usual, max(1, round(longest)), SIGMA)
    return _with_turns(found, steps)


def _with_turns(lengths: Lengths, steps: Sequence[dict[str, Any]]) -> Lengths:
    """The lengths with the turns that environments have counted, and the prompts with which conversations began."""
    totals = Counter[str]()
    for line in steps:
        totals.update({name: value for name, value in line.items() if name.startswith("environment/")})
    attempts = sum(totals[f"environment/attempts_{kind}"] for kind in ("completed", "truncated", "rejected", "failed"))
    turns, added, waited_ms, continued, reread = (
        totals[f"environment/{name}"]
        for name in ("turns", "tokens_added", "waited_ms", "tokens_continued", "tokens_reread")
    )
    further = turns - attempts
    if attempts <= 0 or further <= 0:
        return lengths
    own = Turns(turns / attempts, added / further, waited_ms / 1e3 / further, min(1.0, reread / max(1, continued)))
    prompt = continued / further - (lengths.mean + (own.count - 2) * own.added) / 2
    return replace(lengths, turns=own, prompt=max(lengths.prompt, round(prompt)))


def value_at_key(values: Any, key: str) -> Any:
    """The value of a dotted key in a configuration that was read as plain data; None where it has none."""
    for part in key.split("."):
        values = values.get(part) if isinstance(values, dict) else None
    return values


class ProbeOverdue(PenstockError):
    """A probe that was not done by its deadline."""


class ProbesFailed(PenstockError):
    """None of the probes has measured anything."""


Run = Callable[[Sequence[str], Path, float], int]
"""Function that runs these words with a deadline in seconds, writes the output to a file, and returns the exit code.
Raises `ProbeOverdue`."""


@dataclass(frozen=True)
class Probe:
    """A plan that was tried."""

    plan: Plan
    overrides: tuple[str, ...]
    """The plan's, without what makes a probe of it."""
    step_s: float = 0.0
    """Measured seconds of a step; 0: it failed."""
    failure: str = ""
    """Name of what went wrong, and what was said of it."""


def parse_probes(text: str) -> tuple[int, float | None]:
    """The number of probes and the deadline of each in seconds, of `N` or `N:MINUTES`. Raises `ConfigError`."""
    number, _, minutes = text.partition(":")
    try:
        found = int(number), float(minutes) * 60 if minutes else None
    except ValueError:
        found = 0, None
    if found[0] < 1 or (found[1] is not None and found[1] <= 0):
        raise ConfigError(
            f"--probe {text}: write how many of the best plans are tried, as in --probe 3, or with the minutes that "
            "each may take, as in --probe 3:20."
        )
    return found


def first_steps(config: RunConfig) -> int:
    """Number of steps that do not count: those that fill the pipeline, and at least those that compile."""
    return max(SETTLED, config.max_staleness + 1)


def probe(
    chosen: Sequence[tuple[Plan, Sequence[str]]], place: Path, deadline_s: float | None, run: Run, console: Console
) -> list[Probe]:
    """Try plans one after the other. `chosen`: plans with the words of their runs. Raises `ProbesFailed`."""
    place.mkdir(parents=True, exist_ok=True)
    found = []
    for number, (plan, words) in enumerate(chosen, 1):
        steps = first_steps(plan.config) + STEPS
        limit_s = deadline_s or START_S + TIMES * steps * plan.step_s
        name = f"{number}-{plan.config.placement}-{plan.config.max_staleness}-off"
        own = [
            f"name={name}", f"output_dir={place}", f"trainer.max_steps={steps}", "resume=never", "faults.lease_s=0",
            "evaluation.every_steps=0", "checkpoint.every_steps=0", "tracking.export_model=false", "tracking.sinks=[]",
        ]  # fmt: skip
        console.print(
            f"probe {number} of {len(chosen)}: {steps} steps in {place / name}, within {limit_s / 60:.0f} minutes",
            highlight=False, markup=False, soft_wrap=True,
        )  # fmt: skip
        log = place / f"{name}.log"
        step_s, failure = 0.0, ""
        try:
            code = run([*words, *own], log, limit_s)
            step_s, failure = measured(place / name, first_steps(plan.config)), ""
            if code or not step_s:
                step_s, failure = 0.0, why_failed(place / name, log, code)
        except ProbeOverdue as error:
            failure = recorded_failure(place / name) or f"{type(error).__name__}: {error}"
        found.append(Probe(plan, tuple(words), step_s, failure))
    if not any(one.step_s for one in found):
        failures = "\n".join(f"  {number}: {one.failure}" for number, one in enumerate(found, 1))
        raise ProbesFailed(f"no probe has measured a step; what they printed is in {place}/*.log.\n{failures}")
    return found


def fastest_probe(probes: Sequence[Probe]) -> Probe:
    """The fastest of those that came to their end."""
    return min((one for one in probes if one.step_s), key=lambda one: one.step_s)


def run_in_process(words: Sequence[str], log: Path, deadline_s: float, command: Sequence[str] = COMMAND) -> int:
    """Run in a process of its own. Raises `ProbeOverdue`."""
    with log.open("ab") as file:
        process = subprocess.Popen(
            [*command, *words], stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        return process.wait(deadline_s)
    except subprocess.TimeoutExpired:
        raise ProbeOverdue(
            f"not done after {deadline_s / 60:.1f} minutes; --probe N:MINUTES gives each more. It printed {log}"
        ) from None
    finally:
        _end(process)


def _end(process: "subprocess.Popen[bytes]") -> None:
    """End a run that has not ended: by SIGINT, then by SIGKILL."""
    if process.poll() is not None:
        return
    process.send_signal(signal.SIGINT)
    try:
        process.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def measured(place: Path, first: int) -> float:
    """Mean seconds of a run's steps after the first `first`: with staleness, long and short steps alternate. 0 where
    there are none."""
    try:
        lines = RunDirectory.open(place).read_metrics()
    except (OSError, PenstockError):
        return 0.0
    seconds = [line["timing_s/step"] for line in lines if line.get("step", 0) > first and "timing_s/step" in line]
    return fmean(seconds) if len(seconds) >= STEPS else 0.0


def recorded_failure(place: Path) -> str:
    """The name and first line of a run's failure, by its events; empty where they have none."""
    try:
        events = [event for event in RunDirectory.open(place).read_events() if event["kind"] == "failed"]
    except (OSError, PenstockError):
        return ""
    return f"{events[-1].get('error')}: {events[-1].get('message')}".partition("\n")[0] if events else ""


def why_failed(place: Path, log: Path, code: int) -> str:
    """The name of a run's failure: of its events, else how it ended, with the last line that it printed."""
    if failure := recorded_failure(place):
        return failure
    how = how_ended(code)
    lines = log.read_text(encoding="utf-8", errors="replace").split("\n") if log.is_file() else []
    last = next((line.strip() for line in reversed(lines) if line.strip()), "")
    return f"{how}: {last}" if last and code else f"{how}, fewer than {STEPS} steps that count"

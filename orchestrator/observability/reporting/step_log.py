"""Gathers the metrics of each step from the ranks' reports, the workers' counters since the last step and the store,
and gives them to the sinks and the display.
"""

import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.algorithms.graph.dataflow import Dataflow
from penstock.orchestrator.cluster.fleet.fleet import Fleet
from penstock.orchestrator.cluster.ray_calls import Kind, kind_of
from penstock.orchestrator.observability.reporting.metrics import (
    GROUPS,
    StepTimes,
    hash_metrics,
    joined,
    rank_metrics,
    step_metrics,
)
from penstock.orchestrator.observability.reporting.progress import ProgressDisplay
from penstock.orchestrator.observability.reporting.sinks import Sink, log_to
from penstock.orchestrator.run_directory.run_directory import RunDirectory
from penstock.workers.protocols import Publication
from penstock.workers.reward.reward_worker import LOGGED_COUNT, LOGGED_SUM
from penstock.workers.rollout.rollout_worker import ACCEPTED, DRAFTED, PAUSED, READ_AGAIN
from penstock.workers.trainer.row_hashes import added
from penstock.workers.trainer.step_report import StepReport
from penstock.workers.weights.engine_calls import Delivery

ACCEPTANCE = "rollout/speculation_acceptance"
QUICK_S = 60.0
"""Deadline of calls that only read counters."""
Counters = Mapping[str, float]
PHASES = {
    "rollout": "rollout", "environment": "rollout", "reward": "reward", "scorer": "reference", "compute": "compute",
}  # fmt: skip
"""The phase that the seconds of each computing role count for. The prompts' counters are asked for as well, for what
they leave out."""
COUNTS = {"rollout": "rollout/num_engines", "reward": "reward/num_workers"}
"""Metrics of the numbers of members, for roles whose members may come and go."""


class StepLog:
    """Lifecycle: `begin` with the first step, `write` after each; `emit` for metrics of no step."""

    def __init__(
        self,
        fleet: Fleet,
        flow: Dataflow,
        stats: Callable[[], Awaitable[dict[str, float]]],
        directory: RunDirectory,
        progress: ProgressDisplay,
        sinks: list[Sink],
        counters: Callable[[], Mapping[str, float]],
    ) -> None:
        """`stats`: returns those of the store. `counters`: returns the cumulative ones of the controller's own
        parts."""
        self._usage, self._stats, self._counters = Usage(fleet, flow), stats, counters
        self._directory, self._progress, self._sinks = directory, progress, sinks
        self._began = 0.0
        self._weights: dict[int, int] = {}
        """Hash of the weights of each version whose step is not written yet."""

    def published(self, delivery: Delivery) -> None:
        """Note a version that is sealed, whose line comes later."""
        if isinstance(delivery, Publication) and delivery.checksum:
            self._weights[delivery.version] = delivery.checksum

    def begin(self) -> None:
        self._began = time.time()

    async def write(
        self,
        step: int,
        reports: Sequence[StepReport],
        phases: Mapping[str, float],
        evaluated: Mapping[str, float] | None = None,
    ) -> dict[str, Any]:
        """Write the step's line, and return it. `phases`: seconds of the step's phases besides its update. `evaluated`:
        what was measured after it."""
        usage = await self._usage.since_last(QUICK_S)
        own = usage.dropped | usage.groups | usage.members | usage.updates | usage.environment | usage.logged
        store = await self._stats() | own
        now, train_s = time.time(), max(report.train_s for report in reports)
        kept_s = max(report.seconds.get("keep", 0.0) for report in reports)
        times = StepTimes(
            step_s=now - self._began,
            phase_s={**usage.seconds, "train": train_s, **({"keep": kept_s} if kept_s else {}), **phases},
            busy_s={"train": train_s} | ({"rollout": usage.seconds["rollout"]} if "rollout" in usage.seconds else {}),
        )
        self._began = now
        published = {"weights": self._weights[step]} if step in self._weights else {}
        self._weights = {version: found for version, found in self._weights.items() if version > step}
        hashes = added([*(report.hashes for report in reports), published])
        metrics = step_metrics(
            step,
            step,
            joined([report.rows for report in reports]),
            times,
            trainer=reports[0].metrics | rank_metrics(reports),
            store={**store, **self._counters()},
            generated_length_mean=usage.generated_length_mean,
            evaluated=evaluated,
        ) | hash_metrics(hashes)
        self.emit(step, metrics)
        return metrics

    def emit(self, step: int, metrics: Mapping[str, Any]) -> None:
        log_to(self._sinks, step, metrics, self._directory.failed_writes)
        self._progress.step(step, metrics)


@dataclass
class StepUsage:
    seconds: dict[str, float] = field(default_factory=dict)
    """Busy seconds of each phase, averaged over its workers, by phase."""
    generated_length_mean: float | None = None
    """Mean number of tokens a response, over all responses finished since the last step."""
    dropped: dict[str, float] = field(default_factory=dict)
    """Metrics `dropped/<reason>` of drops before the store: rows of the dataset, cumulative."""
    groups: dict[str, float] = field(default_factory=dict)
    """Metrics `rollout/groups/<engine>` and `rollout/groups_spread`, since the process began."""
    members: dict[str, float] = field(default_factory=dict)
    """Metrics `rollout/num_engines` and `reward/num_workers`: numbers of present members."""
    updates: dict[str, float] = field(default_factory=dict)
    """Metrics `rollout/paused_s`, of the mean engine, and `rollout/prefilled_again` and
    `rollout/speculation_acceptance`, of all, since the last step."""
    environment: dict[str, float] = field(default_factory=dict)
    """Metrics `environment/<count>`: counts since the last step, over all environments."""
    logged: dict[str, float] = field(default_factory=dict)
    """Metrics `logged/<name>`: means of what reward functions have logged since the last step."""


class Usage:
    """Remembers the last counters. `since_last` is called once a step."""

    def __init__(self, fleet: Fleet, flow: Dataflow) -> None:
        self._fleet = fleet
        # Engines and rewards may be there for evaluation alone.
        self._roles = [role for role in PHASES if role not in ("rollout", "reward") or flow.of_kind(role)]
        self._last: dict[str, Counters] = defaultdict(dict)
        self._groups: dict[str, float] = defaultdict(float)
        """Groups sampled by each engine, and by those before it in its place."""
        self._throughout: set[str] = set()
        """Engines that have been there since the first call: the counts of others cannot be compared."""

    async def since_last(self, timeout_s: float) -> StepUsage:
        """The usage since the previous call. Each worker's `stats()` has busy_s; a rollout's also tokens, samples. A
        worker that has died says nothing, and another in its place counts from 0."""
        roles = [*self._roles, "prompts"]
        engines = {name for [name] in self._fleet.teams("rollout")}
        self._throughout = engines if not self._last else self._throughout & engines
        asked = [(role, name, handle) for role in roles for name, handle in self._fleet.role(role)]
        members = [(name, handle) for _, name, handle in asked]
        answers = await self._fleet.roll_call.ask(members, "stats", phase="collect metrics", timeout_s=timeout_s)
        dropped: dict[str, float] = {}
        seconds: dict[str, list[float]] = {PHASES[role]: [] for role, _, _ in asked if role in PHASES}
        environment: dict[str, float] = {}
        updates: dict[str, list[float]] = defaultdict(list)
        logged: dict[str, float] = defaultdict(float)
        drafts: dict[str, float] = defaultdict(float)
        tokens = samples = 0.0
        for (role, name, _), now in zip(asked, answers, strict=True):
            if isinstance(now, Exception):
                if kind_of(now) is Kind.ERROR:
                    raise now
                continue
            if role == "prompts":
                dropped |= {key: value for key, value in now.items() if key.startswith(("dropped/", "curriculum/"))}
                continue
            gained = gained_since(self._last[name], now)
            self._last[name] = now
            if "busy_s" in now:
                seconds[PHASES[role]].append(gained["busy_s"])
            tokens += gained.get("tokens", 0.0)
            samples += gained.get("samples", 0.0)
            for key, count in gained.items():
                if key in (PAUSED, READ_AGAIN):
                    updates[key].append(count)
                if key in (DRAFTED, ACCEPTED):
                    drafts[key] += count
                if key.startswith("environment/"):
                    environment[key] = environment.get(key, 0.0) + count
                if key.startswith((LOGGED_SUM, LOGGED_COUNT)):
                    logged[key] += count
            if role in ("rollout", "environment") and "groups" in now:
                self._groups[name] += gained["groups"]
        means = {phase: sum(values) / max(1, len(values)) for phase, values in seconds.items()}
        return StepUsage(
            means,
            tokens / samples if samples else None,
            dropped,
            group_metrics(self._groups, self._throughout),
            {key: float(sum(role == other for other, _, _ in asked)) for role, key in COUNTS.items() if role in roles},
            {key: sum(counts) / (len(counts) if key == PAUSED else 1) for key, counts in updates.items()}
            | ({ACCEPTANCE: drafts[ACCEPTED] / drafts[DRAFTED]} if drafts[DRAFTED] else {}),
            environment,
            means_of_logged(logged),
        )


def gained_since(before: Counters, now: Counters) -> Counters:
    """The growth of each counter. A counter that is smaller than before is another actor's, which began at 0.

    >>> gained_since({"groups": 6.0}, {"groups": 7.0}), gained_since({"groups": 6.0}, {"groups": 2.0})
    ({'groups': 1.0}, {'groups': 2.0})
    """
    numbers = {key: value for key, value in now.items() if isinstance(value, int | float)}
    gained = {key: value - before.get(key, 0.0) for key, value in numbers.items()}
    return numbers if min(gained.values(), default=0.0) < 0 else gained


def means_of_logged(gained: Counters) -> dict[str, float]:
    """Means of logged metrics, from the growth of their sums and numbers.

    >>> means_of_logged({"logged_sum/exact": 3.0, "logged_count/exact": 4.0, "logged_count/none": 0.0})
    {'logged/exact': 0.75}
    """
    names = [key.removeprefix(LOGGED_COUNT) for key, count in gained.items() if key.startswith(LOGGED_COUNT) and count]
    return {f"logged/{name}": gained[f"{LOGGED_SUM}{name}"] / gained[f"{LOGGED_COUNT}{name}"] for name in names}


def group_metrics(groups: Mapping[str, float], throughout: Collection[str]) -> dict[str, float]:
    """Groups sampled by each engine, and their spread: the most over the least. `throughout`: engines that were there
    all the time; only these can be compared.

    >>> group_metrics({"Rollout-0": 6.0, "Rollout-1": 4.0}, ["Rollout-0", "Rollout-1"])
    {'rollout/groups/Rollout-0': 6.0, 'rollout/groups/Rollout-1': 4.0, 'rollout/groups_spread': 1.5}
    >>> group_metrics({"Rollout-0": 6.0, "Rollout-1": 4.0}, ["Rollout-0"])
    {'rollout/groups/Rollout-0': 6.0, 'rollout/groups/Rollout-1': 4.0}
    """
    metrics = {f"{GROUPS}{name}": count for name, count in groups.items()}
    compared = [count for name, count in groups.items() if name in throughout]
    if len(compared) > 1:
        metrics["rollout/groups_spread"] = max(compared) / max(1.0, min(compared))
    return metrics

"""The diagnosis of a run while it goes on: what is wrong by the steps that are over, and a step that takes too long.

    Diagnosis  looks at each step's metrics by the rules of `rules.py`, and tells what it finds once
    Stalls     looks now and then whether the present step takes far longer than the others, and tells meanwhile which
               actors wait for which, with stacks
    Pace       when a step is too long, by those before it                    pure
    chain_of   whose work the oldest group lacks, from what the store says    pure

Deadlines end a run that hangs for good; `Stalls` says earlier, and without ending anything, where it hangs.
"""

import asyncio
import statistics
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.conf.diagnosis import DiagnosisConfig
from penstock.conf.errors import PenstockError
from penstock.orchestrator.observability.charts.known_curves import KnownCurves
from penstock.orchestrator.observability.diagnosis.history import Finding, History
from penstock.orchestrator.observability.diagnosis.rules import findings
from penstock.orchestrator.observability.reporting.progress import ProgressDisplay
from penstock.orchestrator.run_directory.run_directory import RunDirectory

ACCURACY = "accuracy/heldout"
LEAST_MARGIN = 0.05
"""Accuracy below the worst of a recipe's seeds that is no chance."""
LOOK_S = 1.0
MOST_STACKS = 8
"""Most members whose stacks are read for one stall."""
TWICE = 2.0
"""Least multiple of the longest step so far that counts as a stall: some steps have an evaluation or a checkpoint."""
Describe = Callable[[], Awaitable[Mapping[str, Any]]]
Stacks = Callable[[Sequence[str]], Awaitable[Sequence[str]]]


class Diagnosis:
    """Lifecycle: `look` with each step's metrics. A finding is told when it appears, and again only after it was gone
    for a whole window."""

    def __init__(
        self,
        config: DiagnosisConfig,
        max_staleness: int,
        directory: RunDirectory,
        progress: ProgressDisplay,
        known: KnownCurves | None = None,
    ) -> None:
        """`known`: curves that the recipe is known to have; None: that is not known, or the settings are others."""
        self._known = known
        self._config, self._max_staleness = config, max_staleness
        self._directory, self._progress = directory, progress
        self._history = History(config.window)
        self._told: dict[str, int] = {}
        """The step at which each rule last found something, by rule."""

    def look(self, step: int, metrics: Mapping[str, Any]) -> list[Finding]:
        """Look at a step's metrics. Returns new findings."""
        if not self._config.enabled:
            return []
        self._history.add(metrics)
        new = []
        differs = below_band(self._known, step, metrics) if self._known is not None else None
        rules = findings(self._history, self._config, self._max_staleness)
        for found in (*rules, *([differs] if differs is not None else ())):
            before = self._told.get(found.rule)
            self._told[found.rule] = step
            if before is None or step - before > self._config.window:
                new.append(found)
                self._tell(step, found)
        return new

    def _tell(self, step: int, found: Finding) -> None:
        about = {"rule": found.rule, "text": found.text, "advice": found.advice}
        self._directory.event(found.level, step=step, **about)
        self._progress.warn(found.level, found.text, found.advice)


def below_band(known: KnownCurves, step: int, metrics: Mapping[str, Any]) -> Finding | None:
    """What there is to say of a run of a recipe's own settings whose held-out accuracy is below that of its seeds."""
    curve, value = known.curves.get(ACCURACY), metrics.get(ACCURACY)
    if curve is None or value is None or step not in curve.steps:
        return None
    at = curve.steps.index(step)
    low, high = curve.low[at], curve.high[at]
    if value >= low - max(LEAST_MARGIN, high - low):
        return None
    return Finding(
        "below_band",
        f"held-out accuracy is {value:.1%}, and with the recipe's {len(known.seeds)} seeds {low:.1%} to {high:.1%}",
        "The settings are the recipe's: look for what else differs, such as versions of packages, the model, the data, "
        f"or the CPU (theirs: {known.cpu}).",
    )


class Pace:
    """The usual duration of a run's steps."""

    def __init__(self, config: DiagnosisConfig) -> None:
        self._config = config
        self._last: deque[float] = deque(maxlen=config.window)
        self._longest = 0.0

    def add(self, seconds: float) -> None:
        self._last.append(seconds)
        self._longest = max(self._longest, seconds)

    @property
    def limit_s(self) -> float | None:
        """Seconds after which a step counts as stalled. None: there were too few steps to tell."""
        if len(self._last) < self._config.window:
            return None
        usual = self._config.stall_factor * statistics.median(self._last)
        return max(usual, TWICE * self._longest, self._config.stall_least_s)


@dataclass(frozen=True)
class Chain:
    """A chain of waits."""

    text: str
    members: tuple[str, ...] = ()
    """Members whose turn it is."""


def chain_of(described: Mapping[str, Any], writers: Mapping[str, str], ranks: Sequence[str]) -> Chain:
    """The chain of waits of the oldest group. `described`: what `StoreClient.describe` says. `writers`: the stage that
    writes each column, by column, in the order of the dataflow. `ranks`: the trainer's, whose turn it is where nothing
    is lacking."""
    group, lacking = described.get("oldest_group"), described.get("oldest_group_waits_for") or {}
    column = next((name for name in writers if name in lacking), None)
    if group is None or column is None:
        return Chain(f"no group waits for anything: it is the turn of {', '.join(ranks)}", tuple(ranks))
    stage = writers[column]
    leases = [lease for lease in described.get("leases", ()) if lease["stage"] == stage]
    owners = tuple(dict.fromkeys(str(lease["owner"]) for lease in leases))
    missing = f"the oldest group, {group}, lacks {column} of {lacking[column]} row(s), which {stage} writes"
    if owners:
        rows = sum(int(lease["open_rows"]) for lease in leases)
        return Chain(f"{missing}: {rows} row(s) of that stage are under way with {', '.join(owners)}", owners)
    idle = tuple(map(str, (described.get("waiters") or {}).get(stage) or ()))
    states = (described.get("rows") or {}).get(stage) or {}
    if states.get("free"):
        return Chain(f"{missing}: nobody has taken its {states['free']} row(s) that are ready", idle)
    return Chain(f"{missing}, and nobody has it under way", idle)


class Stalls:
    """Lifecycle: `finished` after each step, `run` until it is cancelled."""

    def __init__(
        self,
        config: DiagnosisConfig,
        describe: Describe,
        stacks: Stacks,
        writers: Mapping[str, str],
        ranks: Callable[[], Sequence[str]],
        directory: RunDirectory,
        progress: ProgressDisplay,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`stacks`: writes the stacks of members and returns the files' names. `ranks`: returns the trainer's present
        ones."""
        self._config, self._describe, self._stacks = config, describe, stacks
        self._writers, self._ranks = writers, ranks
        self._directory, self._progress, self._clock = directory, progress, clock
        self._pace = Pace(config)
        self._step, self._since, self._is_told = 0, clock(), False

    def finished(self, step: int, seconds: float | None) -> None:
        """Note that a step is over. `seconds`: its duration; None: not known."""
        if seconds is not None:
            self._pace.add(seconds)
        self._step, self._since, self._is_told = step, self._clock(), False

    async def run(self) -> None:
        while self._config.enabled:
            await asyncio.sleep(LOOK_S)
            limit_s = self._pace.limit_s
            waited_s = self._clock() - self._since
            if limit_s is not None and waited_s > limit_s and not self._is_told:
                self._is_told = True
                await self._tell(waited_s)

    async def _tell(self, waited_s: float) -> None:
        step = self._step + 1
        try:
            chain = chain_of(await self._describe(), self._writers, self._ranks())
        except PenstockError as error:
            chain = Chain(f"the store does not say who waits for whom: {error}")
        files = list(await self._stacks(chain.members[:MOST_STACKS]))
        text = f"step {step} has taken {waited_s:.0f} s so far: {chain.text}"
        advice = (
            f"What they are at: {', '.join(files)} in the run's directory." if files else "`penstock status` says more."
        )
        about = {"rule": "stall", "text": text, "advice": advice}
        self._directory.event("warning", step=step, **about, members=list(chain.members), stacks=files)
        self._progress.warn("warning", text, advice)

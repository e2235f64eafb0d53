"""The outcome of a simulated run in numbers: how long a step takes, who was busy, what each side waited for.

The first `max_staleness + 1` steps fill the pipeline. They are left out of rates and shares where there are others.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

from penstock.planner.simulation.engine import EngineSeconds
from penstock.planner.simulation.engines import SimulatedEngines
from penstock.planner.simulation.events import Clock, SimulatedStore
from penstock.planner.simulation.trainer import PROMPTS, SimulatedStep

UPDATE, SYNC, TURN = "updating", "waiting for the weight sync", "changing turns"


@dataclass(frozen=True)
class Simulated:
    """The outcome of a simulated run."""

    num_steps: int
    seconds: float
    """Seconds of the whole run."""
    step_s: float
    """Mean seconds of a step, once the pipeline is full."""
    tokens_per_s: float
    """Sampled tokens that were trained, a second."""
    samples_per_s: float
    engines: Mapping[str, float]
    """Shares of the engines' time, by what they did; they sum to 1. Empty without engines."""
    ranks: Mapping[str, float]
    """Shares of the ranks' time, by what they did or waited for; they sum to 1."""
    staleness: Mapping[int, int]
    """Rows that were trained, by the staleness of their oldest token."""
    staleness_mean: float
    """Mean staleness of all tokens, in versions."""
    dropped: Mapping[str, int]
    """Rows that were dropped, by reason."""
    num_faults: int
    num_events: int
    steps_s: tuple[float, ...] = ()
    """Seconds of each step, from the end of the one before to its own."""


class Account:
    """A watcher that counts. Lifecycle: told of each step; `result` once the run is over."""

    def __init__(
        self, store: SimulatedStore, clock: Clock, engines: SimulatedEngines | None, num_steps: int, num_first: int
    ) -> None:
        """`num_first`: steps that fill the pipeline."""
        self._store, self._clock, self._engines, self._num_steps = store, clock, engines, num_steps
        self._num_first = num_first if num_first < num_steps else 0
        self._began, self._before = 0.0, EngineSeconds()
        """Seconds after which the steps that count began, and what engines had done until then."""
        self._ended: list[float] = []
        self._ranks: dict[str, float] = defaultdict(float)
        self._tokens = self._rows = 0
        self._staleness: Counter[int] = Counter()
        self._staleness_sum = self._all_tokens = 0

    def trained(self, step: SimulatedStep) -> None:
        groups, size = self._store.ledger.residents.groups, self._store.ledger.residents.size
        notes = self._store.notes
        version, tokens, rows = step.step - 1, 0, sum(map(len, step.parts))
        for number in {row // size for part in step.parts for row in part}:
            group = groups[number]
            of_group = sum(group.of_live(group.response_tokens))
            tokens += of_group
            if sums := notes[number].version_sums:
                self._staleness_sum += version * of_group - sum(group.of_live(sums))
                self._staleness.update(version - oldest for oldest in group.of_live(group.oldest))
        self._all_tokens += tokens
        if step.step > self._num_first:
            self._tokens += tokens
            self._rows += rows

    def closed(self, step: SimulatedStep) -> None:
        if step.step > self._num_first:
            phases = {f"waiting for {stage}": seconds for stage, seconds in step.waits.items()} | {
                TURN: step.taken - step.formed,
                UPDATE: step.updated - step.taken,
                SYNC: step.closed - step.updated,
            }
            for what, seconds in phases.items():
                if seconds > 0:
                    self._ranks[what] += seconds

    def served(self, step: SimulatedStep) -> None:
        self._ended.append(self._clock.passed_s)
        if step.step == self._num_first:
            self._began = self._clock.passed_s
            self._before = self._engines.seconds() if self._engines is not None else EngineSeconds()

    def result(self) -> Simulated:
        seconds = self._ended[-1] - self._began
        counters = self._store.ledger.counters
        ends = [0.0, *self._ended]
        shares = sum(self._ranks.values())
        return Simulated(
            num_steps=self._num_steps,
            seconds=self._ended[-1],
            step_s=seconds / (self._num_steps - self._num_first),
            tokens_per_s=self._tokens / seconds if seconds else 0.0,
            samples_per_s=self._rows / seconds if seconds else 0.0,
            engines=self._engine_shares(),
            ranks={what: value / shares for what, value in sorted(self._ranks.items(), key=lambda one: -one[1])},
            staleness=dict(sorted(self._staleness.items())),
            staleness_mean=self._staleness_sum / self._all_tokens if self._all_tokens else 0.0,
            dropped={name.partition("/")[2]: n for name, n in counters.items() if name.startswith("dropped/")},
            num_faults=self._engines.num_lost if self._engines is not None else 0,
            num_events=self._clock.num_events,
            steps_s=tuple(after - before for before, after in pairwise(ends)),
        )

    def _engine_shares(self) -> dict[str, float]:
        if self._engines is None:
            return {}
        now, before = self._engines.seconds(), self._before
        there = now.there - before.there
        busy = {
            "decoding": now.decoding - before.decoding,
            "reading prompts": now.reading - before.reading,
            "loading weights": now.loading - before.loading,
        }
        busy[f"waiting for {PROMPTS}"] = max(0.0, there - sum(busy.values()))
        return {what: seconds / there for what, seconds in busy.items()} if there else {}

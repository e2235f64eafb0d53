"""Evaluation of a simulated run: `control/evaluation.py` on a virtual clock, on engines that are taken up by it.

    blocking   all engines have a version ─▶ they answer the problems ─▶ served
    shared     served ─▶ they answer them beside their groups; the next load waits
    lent       some are lent ─▶ served ─▶ they finish their groups, skip loads, answer ─▶ newest version, groups again
    own        served ─▶ engines that do nothing else load it and answer

Each problem is answered greedily; once all are, its further samples are made. Rewards take no time.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from penstock.planner.durations import Durations
from penstock.planner.simulation.engines import SampledGroup, SimulatedEngine, SimulatedEngines
from penstock.planner.simulation.events import Clock
from penstock.planner.simulation.simulated_members import SimulatedSamples

BLOCKING, SHARED, LENT, OWN = "blocking", "shared", "lent", "own"
FIRST_PROBLEM = 1_000_000_000
"""Number of the first problem, for lengths of its responses: no group has it."""


@dataclass(frozen=True)
class EvaluationPlan:
    """What is evaluated, when, and on which engines."""

    every_steps: int
    num_problems: int
    num_samples: int = 0
    """Samples of each problem beside the greedy response."""
    way: str = BLOCKING
    num_engines: int = 0
    """Number of engines that are lent, or that do nothing else."""


@dataclass(frozen=True)
class EvaluationTimes:
    """One evaluation, in seconds since the run began."""

    step: int
    due: float
    """Time at which engines have the step's version."""
    ended: float


class ProblemRound:
    """Problems on engines, as many sequences at a time as each has room for. Lifecycle: `begin` once, `finished` with
    all that its engines finish; `ended` is called once all problems are answered."""

    def __init__(
        self, plan: EvaluationPlan, samples: SimulatedSamples, max_sequences: int, ended: Callable[[], None]
    ) -> None:
        """`max_sequences`: most that an engine decodes at a time."""
        self._plan, self._samples, self._max_sequences, self._ended = plan, samples, max_sequences, ended
        self._sizes = [1, *([plan.num_samples] if plan.num_samples else [])]
        """Responses a problem of each pass that is left, first the greedy one."""
        self._engines: list[SimulatedEngine] = []
        self._left: dict[str, list[SampledGroup]] = {}
        self._under_way: dict[str, dict[int, SampledGroup]] = {}

    def begin(self, engines: Sequence[SimulatedEngine]) -> None:
        self._engines = list(engines)
        self._next_pass()

    def finished(self, engine: SimulatedEngine, group: SampledGroup) -> None:
        """Note that an engine has finished a problem, or a group of the run's own, and has room."""
        if engine in self._engines:
            self._under_way[engine.name].pop(group.group, None)
            self._feed(engine)
            self._look()

    def lose(self, name: str) -> bool:
        """Give the problems of an engine that is gone to the others. Returns False if there are none."""
        again = [*self._left.pop(name, ()), *self._under_way.pop(name, {}).values()]
        self._engines = [engine for engine in self._engines if engine.name != name]
        if not self._engines:
            return False
        for index, problem in enumerate(again):
            engine = self._engines[index % len(self._engines)]
            self._left[engine.name].append(self._made(problem.group, len(problem.lengths)))
        for engine in self._engines:
            self._feed(engine)
        self._look()
        return True

    def _next_pass(self) -> None:
        size, count = self._sizes.pop(0), len(self._engines)
        for index, engine in enumerate(self._engines):
            numbers = range(index, self._plan.num_problems, count)
            self._left[engine.name] = [self._made(FIRST_PROBLEM + number, size) for number in numbers]
            self._under_way[engine.name] = {}
        for engine in self._engines:
            self._feed(engine)
        self._look()

    def _made(self, number: int, size: int) -> SampledGroup:
        lengths = [self._samples.length(number, sample) for sample in range(size)]
        return SampledGroup(None, number, [], self._samples.prompt_tokens, lengths, "evaluation")

    def _feed(self, engine: SimulatedEngine) -> None:
        left, given = self._left[engine.name], list[SampledGroup]()
        busy = sum(len(group.lengths) for group in engine.groups.values())
        while left and (not busy or busy + len(left[0].lengths) <= self._max_sequences):
            given.append(left.pop(0))
            busy += len(given[-1].lengths)
        self._under_way[engine.name].update((problem.group, problem) for problem in given)
        if given:
            engine.take(given)

    def _look(self) -> None:
        if any(self._left.values()) or any(self._under_way.values()):
            return
        if self._sizes:
            self._next_pass()
        else:
            self._ended()


class SimulatedEvaluation:
    """Between the trainer and the engines. Lifecycle: `load` in place of the engines'; `is_over` once no result is to
    come."""

    def __init__(
        self, plan: EvaluationPlan, engines: SimulatedEngines, durations: Durations, samples: SimulatedSamples,
        clock: Clock, max_sequences: int, num_steps: int,
    ) -> None:  # fmt: skip
        """`durations`: of own engines. `num_steps`: of the run; its last step is evaluated, too."""
        self._plan, self._engines, self._samples, self._clock = plan, engines, samples, clock
        self._max_sequences, self._num_steps = max_sequences, num_steps
        self.times: list[EvaluationTimes] = []
        self._due: list[tuple[int, float]] = []
        """Steps that are not evaluated yet, each with the time from which on they could be."""
        self._round: ProblemRound | None = None
        self._team: list[str] = []
        """Engines that are lent, by name."""
        self._served: Callable[[], None] | None = None
        self._held: Callable[[], None] | None = None
        """The load that waits for the end of a shared evaluation."""
        engines.on_finished, engines.on_spare = self._finished, self._spare
        self._own = [
            SimulatedEngine(
                f"Evaluation-{index}", durations, clock, 0, self._finished, lambda engine, version: self._go()
            )
            for index in range(plan.num_engines if plan.way == OWN else 0)
        ]

    @property
    def is_over(self) -> bool:
        return not self._due

    def load(self, version: int, served: Callable[[], None]) -> None:
        """Have the engines load a version. `served`: called once the store is to hear of it."""

        def load() -> None:
            self._engines.load(version, lambda: self._loaded(version, served))

        if self._plan.way == SHARED and self._due:
            self._held = load
        else:
            load()

    def _loaded(self, version: int, served: Callable[[], None]) -> None:
        if version % self._plan.every_steps and version != self._num_steps:
            served()
            return
        is_free = not self._due
        self._due.append((version, self._clock.passed_s))
        if self._plan.way == BLOCKING:
            self._served = served
            self._go()
            return
        if self._plan.way == LENT and is_free:
            there = [name for name in self._engines.there if self._engines.there[name].version == version]
            self._team = there[-min(self._plan.num_engines, len(there) - 1) :] if len(there) > 1 else []
            self._engines.lend(self._team)
        served()
        if is_free and self._plan.way != LENT:
            self._go()

    def _members(self) -> list[SimulatedEngine]:
        if self._plan.way == OWN:
            return self._own
        there = self._engines.there
        return [there[name] for name in self._team if name in there] if self._plan.way == LENT else [*there.values()]

    def _spare(self, name: str) -> None:
        if name in self._engines.there:
            self._go()
            return
        self._team = [one for one in self._team if one != name]
        if self._round is not None and not self._round.lose(name):
            self._ended(is_lost=True)
        else:
            self._go()

    def _go(self) -> None:
        """Begin the next evaluation, once its engines have finished their groups and loaded its version."""
        if self._round is not None or not self._due:
            return
        version, members = self._due[0][0], self._members()
        if self._plan.way in (LENT, OWN):
            for engine in members:
                if not engine.groups and engine.version != version:
                    engine.load(version)
            if any(engine.groups or engine.version != version for engine in members):
                return
        if not members:
            self._ended(is_lost=True)
            return
        self._round = ProblemRound(self._plan, self._samples, self._max_sequences, self._ended)
        self._round.begin(members)

    def _finished(self, engine: SimulatedEngine, group: SampledGroup) -> None:
        if self._round is not None:
            self._round.finished(engine, group)
        elif engine.name in self._team:
            self._go()

    def _ended(self, *, is_lost: bool = False) -> None:
        version, due = self._due.pop(0)
        self._round = None
        if not is_lost:
            self.times.append(EvaluationTimes(version, due, self._clock.passed_s))
        if self._due:
            self._go()
            return
        if self._plan.way == LENT:
            self._team, team = [], self._team
            self._engines.take_back(team)
        served, self._served = self._served, None
        held, self._held = self._held, None
        for action in (served, held):
            if action is not None:
                action()


def seconds_alone(
    plan: EvaluationPlan, num_engines: int, durations: Durations, samples: SimulatedSamples, max_sequences: int
) -> float:
    """Seconds of an evaluation on engines that do nothing else and have its version."""
    clock, ended = Clock(), list[float]()
    problems = ProblemRound(plan, samples, max_sequences, lambda: ended.append(clock.now))
    problems.begin(
        [
            SimulatedEngine(f"Evaluation-{index}", durations, clock, 0, problems.finished, lambda engine, version: None)
            for index in range(num_engines)
        ]
    )
    while not ended and clock.step():
        pass
    return ended[0]

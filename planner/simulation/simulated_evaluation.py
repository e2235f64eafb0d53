"""Evaluation of a simulated run: `control/evaluation.py` and `control/evaluations.py` on a virtual clock.

    blocking   all engines have a version ─▶ they answer the problems ─▶ served
    beside     served ─▶ some are lent, finish their groups, skip loads, answer ─▶ newest version, groups again
               an engine alone answers beside its groups, and the next version waits for it
    own        served ─▶ engines that do nothing else load it and answer

Each problem is answered greedily; once all are, its further samples are made. Rewards take no time.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean

from penstock.conf.checks import AUTO
from penstock.conf.run import RunConfig
from penstock.orchestrator.control.evaluations import engines_to_lend
from penstock.planner.durations import Durations
from penstock.planner.simulation.engines import SampledGroup, SimulatedEngine, SimulatedEngines
from penstock.planner.simulation.events import Clock
from penstock.planner.simulation.simulated_members import SimulatedSamples

BLOCKING, BESIDE, OWN = "blocking", "beside", "own"
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
    share: int | str = AUTO
    """`evaluation.share`, of engines that are lent."""
    num_own: int = 1
    """Number of engines that do nothing else."""

    @classmethod
    def of(cls, config: RunConfig) -> "EvaluationPlan | None":
        """What a run evaluates; None: nothing."""
        own = config.evaluation
        if not own.every_steps:
            return None
        num_problems = own.num_problems + sum(one.num_problems for one in own.sets.values())
        way = (OWN if own.num_workers else BESIDE) if config.evaluates_beside else BLOCKING
        return cls(own.every_steps, num_problems, own.num_samples, way, own.share, own.num_workers)


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
        """`durations`: of an engine. `num_steps`: of the run; its last step is evaluated, too."""
        self._plan, self._engines, self._samples, self._clock = plan, engines, samples, clock
        self._max_sequences, self._num_steps = max_sequences, num_steps
        self.times: list[EvaluationTimes] = []
        self._now: tuple[int, float] | None = None
        """The step that is evaluated, and the time from which on it could be."""
        self._due: list[tuple[int, float]] = []
        """Steps that wait for the evaluation before."""
        self._round: ProblemRound | None = None
        self._lent: list[str] = []
        self._served: Callable[[], None] | None = None
        self._held: Callable[[], None] | None = None
        """The load that waits for an evaluation."""
        self._begun = 0.0
        self._engine_s = seconds_alone(plan, 1, durations, samples, max_sequences)
        """Seconds of one engine for an evaluation: a run has measured it before its first step."""
        engines.on_finished, engines.on_spare = self._finished, self._spare
        self._own = [
            SimulatedEngine(
                f"Evaluation-{index}", durations, clock, 0, self._finished, lambda engine, version: self._go()
            )
            for index in range(plan.num_own if plan.way == OWN else 0)
        ]

    @property
    def is_over(self) -> bool:
        return self._now is None and not self._due

    def load(self, version: int, served: Callable[[], None]) -> None:
        """Have the engines load a version. `served`: called once the store is to hear of it."""

        def load() -> None:
            self._engines.load(version, lambda: self._loaded(version, served))

        if self._holds_loads:
            self._held = load
        else:
            load()

    @property
    def _holds_loads(self) -> bool:
        """True if the next version waits: for an engine that evaluates it beside its samples, or for its own turn."""
        if self._plan.way != BESIDE:
            return False
        return bool(self._due) or (self._now is not None and not self._lent)

    def _loaded(self, version: int, served: Callable[[], None]) -> None:
        if version % self._plan.every_steps and version != self._num_steps:
            served()
            return
        if self._blocks(version):
            self._served = served
        else:
            served()
        self._due.append((version, self._clock.passed_s))
        self._next()

    def _blocks(self, version: int) -> bool:
        """Return whether nothing is trained beside it: after the last step there is nothing to train."""
        return self._plan.way == BLOCKING or (self._plan.way == BESIDE and version == self._num_steps)

    def _next(self) -> None:
        """Take up the next evaluation, unless one runs."""
        if self._now is not None or not self._due:
            return
        self._now = self._due.pop(0)
        version, now = self._now[0], self._clock.passed_s
        if self._plan.way == BESIDE and not self._blocks(version):
            there = [name for name, engine in self._engines.there.items() if engine.version == version]
            number = engines_to_lend(self._plan.share, len(there), self._engine_s, now - self._begun)
            self._lent = there[len(there) - number :]
            self._engines.lend(self._lent)
        self._begun = now
        self._go()

    def _members(self) -> list[SimulatedEngine]:
        there = self._engines.there
        return self._own or [there[name] for name in self._lent] or [*there.values()]

    def _spare(self, name: str) -> None:
        """Hear of an engine that was lent, has loaded a version while it is, or is lost."""
        if name not in self._engines.there:
            was_lent, self._lent = name in self._lent, [one for one in self._lent if one != name]
            if (was_lent and not self._lent) or (self._round is not None and not self._round.lose(name)):
                self._ended(is_lost=True)
        self._go()

    def _go(self) -> None:
        """Begin what was taken up, once its engines have finished their groups and have its version."""
        if self._round is not None or self._now is None:
            return
        version, members = self._now[0], self._members()
        for engine in self._own:
            if engine.version != version:
                engine.load(version)
        if any(engine.groups for engine in members if self._lent) or any(one.version != version for one in self._own):
            return
        if not members:
            self._ended(is_lost=True)
            return
        self._round = ProblemRound(self._plan, self._samples, self._max_sequences, self._ended)
        self._round.begin(members)

    def _finished(self, engine: SimulatedEngine, group: SampledGroup) -> None:
        if self._round is not None:
            self._round.finished(engine, group)
        elif engine.name in self._lent:
            self._go()

    def _ended(self, *, is_lost: bool = False) -> None:
        assert self._now is not None
        version, due = self._now
        self._now = self._round = None
        if not is_lost:
            self.times.append(EvaluationTimes(version, due, self._clock.passed_s))
        self._lent, lent = [], self._lent
        self._engines.take_back(lent)
        served, self._served = (self._served, None) if self._blocks(version) else (None, self._served)
        if served is not None:
            served()
        self._next()
        if self._held is not None and not self._holds_loads:
            held, self._held = self._held, None
            held()


def mean_steps(
    steps_s: Sequence[float], evaluations: Sequence[EvaluationTimes], num_first: int
) -> tuple[float | None, float | None]:
    """Mean seconds of the steps beside which something is evaluated, and of the others; None: there are none. The first
    `num_first` and the last are left out: they fill the pipeline, and after the last one nothing is left to train."""
    beside, others, end = list[float](), list[float](), 0.0
    for number, seconds in enumerate(steps_s[:-1]):
        end += seconds
        if number >= num_first:
            is_beside = any(one.due < end and one.ended > end - seconds for one in evaluations)
            (beside if is_beside else others).append(seconds)
    return fmean(beside) if beside else None, fmean(others) if others else None


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

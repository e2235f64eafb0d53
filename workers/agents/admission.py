"""Admission of attempts: as many as will fit the KV memory of the engines until they end.

    engines ─▶ a `KvLoad` each, about every second ─▶ AdmissionControl: a forecast of the memory ─▶ how many may begin
    attempts ─▶ their ages now, and at their ends ─┘                       AttemptGate: those of earlier groups first

The forecast is that of the Past-Future scheduler (Gong et al., arXiv 2507.10150), for attempts of several turns and
engines that report totals. An attempt grows until it ends, and ends as recent ones did that became as old. New ones
begin while the expected memory, with two standard deviations, fits at each time ahead. Turns of attempts under way pass
no gate, so they go before new attempts. Ages are in decode steps: engines that have more to do take longer for each.
"""

import asyncio
import heapq
import math
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from penstock.workers.agents.gateway.engine_pool import EnginePool
from penstock.workers.protocols import KvLoad

SIGMAS = 2.0
"""Standard deviations of the forecast that are kept free."""
NUM_RECENT = 512
"""Attempts whose age at the end is remembered: shares of them have errors of about 2%."""
WEIGHT = 0.05
"""Weight of a report in means: about the last 20 count."""
NUM_TIMES = 64
"""Times ahead that are looked at, each about a tenth further than the one before."""
FIRST_SHARE = 0.03
"""Share of the largest age that no attempt is expected to end before, while nothing is known of their ends."""
READ_SPEED = 10.0
"""Tokens that a GPU reads, roughly, in the time in which it samples one."""

Floats = NDArray[np.float64]


@dataclass(eq=False)
class Attempt:
    """An attempt that waits to begin, or is under way. A lower priority comes first."""

    priority: int
    order: int
    """Position in the order of arrival."""
    came_s: float
    may_begin: "asyncio.Future[None]"
    began_s: float = math.inf
    conversation: object = None
    """Key of its turns in the `EnginePool`."""
    age: float = 0.0
    """Decode steps since it began, without those in which it waited for memory."""

    def __lt__(self, other: "Attempt") -> bool:
        return (self.priority, self.order) < (other.priority, other.order)


@dataclass(frozen=True)
class TurnShape:
    """The turns of an environment: means for each sampled token."""

    added: float = 0.0
    """Tokens that the environment adds between turns."""
    continued: float = 0.0
    """Tokens of the conversation before a turn, which are read again if they are evicted between turns."""


@dataclass(frozen=True)
class EngineReport:
    """The state of one engine. `attempts`: those of this actor that are on it, the first ones to be served first."""

    load: KvLoad
    attempts: Sequence[Attempt]
    num_in_flight: int
    """Samples that this actor's attempts wait for."""

    def num_served(self, num_actors: int) -> int:
        """Number of the first attempts that have memory or are between turns. The others wait for memory."""
        num_waiting = max(0.0, self.num_in_flight - self.load.num_running / num_actors)
        samples_each = max(1.0, self.num_in_flight / max(1, len(self.attempts)))
        return max(0, len(self.attempts) - round(num_waiting / samples_each))


def survival(ended: Floats, alive: Floats, limit: float) -> Callable[[Floats], Floats]:
    """The share of attempts that become older than an age: the estimate of Kaplan and Meier, with one more attempt, of
    which nothing is known. `ended`: ages at the end. `alive`: ages of those under way. Of attempts that are older than
    all of these, as many end in each doubling of the age, up to `limit`."""
    ended, known = np.sort(ended), np.sort(np.concatenate([ended, alive]))
    oldest = known[-1] if len(known) else 0.0
    first = max(oldest, FIRST_SHARE * limit)
    place_among_equals = np.arange(len(ended)) - np.searchsorted(ended, ended)
    num_as_old = len(known) - np.searchsorted(known, ended) - place_among_equals + 1
    shares = np.concatenate([[1.0], np.cumprod(1 - 1 / num_as_old)])

    def share(ages: Floats) -> Floats:
        beyond = np.clip(np.log(limit / np.maximum(ages, first)) / np.log(limit / first), 0.0, 1.0)
        found: Floats = shares[np.searchsorted(ended, ages, side="right")] * np.where(ages > oldest, beyond, 1.0)
        return found

    return share


@dataclass(frozen=True)
class Growth:
    """The mean memory of an attempt by its age, as a share of the engine's."""

    prompt: float
    step: float
    """What each decode step adds."""
    largest: float
    """Memory of a sequence of the full length."""

    def __call__(self, ages: Floats) -> Floats:
        found: Floats = np.minimum(self.largest, self.prompt + self.step * ages)
        return found


class EngineForecast:
    """The memory of one engine ahead. Lifecycle: `follow` with each report; then `limit` and `allowance` hold."""

    def __init__(self, num_actors: int, load: KvLoad, prompt: float = 0.0) -> None:
        """`num_actors`: actors that share the engine and do the same. `prompt`: as of `Growth`, until there is one."""
        self._num_actors = num_actors
        self.growth = Growth(prompt, 1 / load.num_tokens, load.max_len / load.num_tokens)
        self._missed = 0.0
        """Mean square of what the last forecast has missed."""
        self._active = 1.0
        """Mean share of the attempts that sample; the others wait for a tool."""
        self.limit = self.allowance = 0.0
        """Attempts of this actor that may be under way, and those that may begin before the next report."""

    def follow(self, report: EngineReport, ended: Floats, alive: Floats, shape: TurnShape, num_steps: float) -> None:
        """Take a report, `num_steps` after the last one. `ended`, `alive`: as of `survival`, for all engines."""
        ages = np.array([attempt.age for attempt in report.attempts])
        self._fit(report, ages, shape)
        end = max(self.growth.largest / self.growth.step, 2 * max(ended.max(initial=0.0), alive.max(initial=0.0)))
        ahead = np.concatenate([[0.0], np.geomspace(max(1.0, end / 1000), end, NUM_TIMES)])
        share = survival(ended, alive, end)
        later = ages[:, None] + ahead
        chance = share(later) / np.maximum(share(ages)[:, None], 1e-9)
        memory = self.growth(later)
        mean = self._num_actors * (memory * chance).sum(0)
        variance = self._num_actors * (memory**2 * chance * (1 - chance)).sum(0) + self._missed
        new = self.growth(ahead) * share(ahead)
        num_more = (1 - mean - SIGMAS * np.sqrt(variance)) / np.maximum(new, 1e-9) / self._num_actors
        is_soon = ahead < max(num_steps, 1e-9)
        self.limit = len(ages) + num_more[is_soon].min()
        self.allowance = max(0.0, num_more[~is_soon].min(initial=math.inf))

    def _fit(self, report: EngineReport, ages: Floats, shape: TurnShape) -> None:
        """Fit the growth to the memory in use. An attempt samples a share of the time, `active`: then it grows by a
        token a step, and by what is added between turns, and has memory. The rest in use is prompts."""
        load, num_served = report.load, report.num_served(self._num_actors)
        step = (1 + shape.added) / load.num_tokens
        if not (num_served and load.num_running):  # none is under way, or all are between turns
            if not len(ages):
                self.growth = replace(self.growth, step=step)
            return
        served = self._num_actors * num_served
        active = load.num_running / served
        self._active += WEIGHT * (active - self._active)
        prompt, step = max(0.0, load.usage / served - active**2 * step * ages[:num_served].mean()), active**2 * step
        if shape.continued / READ_SPEED > 1 / self._active - 1:  # to read again costs more than to wait idly
            prompt, step = prompt / active, step / active
        before, self.growth = self.growth, Growth(prompt, step, self.growth.largest)
        error = self._num_actors * (self.growth(ages).sum() - before(ages).sum())
        self._missed += WEIGHT * (error**2 - self._missed)


class AdmissionControl:
    """The number of attempts that one actor may have under way. Pure: reports in, numbers out.

    Lifecycle: `ended` for each attempt, `report` once a second. Engines that report no memory have no limit.
    """

    def __init__(self, most: int, num_actors: int = 1, *, follows: bool = False) -> None:
        """`most`: upper bound. `num_actors`: environment actors that share the engines. `follows`: there will be
        reports; before the first one attempts begin one at a time."""
        self.most, self._num_actors = most, num_actors
        self._forecasts: dict[str, EngineForecast] = {}
        self._num_steps: dict[str, float] = {}
        self._reported_s = -math.inf
        self._ended: deque[tuple[float, float, float]] = deque(maxlen=NUM_RECENT)
        """Attempts that have ended since the last report: their age at that report, when they began and ended."""
        self._ages_at_end: deque[float] = deque(maxlen=NUM_RECENT)
        self.has_report = False
        self._limit = float(most)
        self._allowance = 0.0 if follows else math.inf

    def limit(self, num_under_way: int) -> int:
        """Attempts that may be under way, when so many are: one in any case."""
        return max(1, int(min(self.most, self._limit, num_under_way + self._allowance)))

    def hold(self, num_under_way: int) -> None:
        """Keep as many under way as there are, until engines report again."""
        if self.has_report and self._allowance < math.inf:
            self._limit, self._allowance = float(num_under_way), math.inf

    def begun(self) -> None:
        """Note that an attempt has begun."""
        self._allowance = max(0.0, self._allowance - 1)

    def ended(self, attempt: Attempt, now_s: float) -> None:
        """Note that an attempt has ended."""
        self._ended.append((attempt.age, attempt.began_s, now_s))

    def report(self, reports: Mapping[str, EngineReport | None], now_s: float, shape: TurnShape = TurnShape()) -> None:
        """Set the limit by reports of the engines that serve now; None: of one that knows no limit."""
        self.has_report = True
        known = {name: report for name, report in reports.items() if report is not None}
        steps = self._grow_older(known, now_s)
        if len(known) < len(reports):
            self._limit = self._allowance = math.inf
            return
        ended = np.array(self._ages_at_end)
        alive = np.array([attempt.age for report in known.values() for attempt in report.attempts])
        prompt = max((forecast.growth.prompt for forecast in self._forecasts.values()), default=0.0)
        forecasts = {name: EngineForecast(self._num_actors, report.load, prompt) for name, report in known.items()}
        forecasts.update({name: self._forecasts[name] for name in known if name in self._forecasts})
        for name, report in known.items():
            forecasts[name].follow(report, ended, alive, shape, steps[name])
        self._forecasts = forecasts
        self._limit = sum(forecast.limit for forecast in forecasts.values())
        self._allowance = sum(forecast.allowance for forecast in forecasts.values())

    def _grow_older(self, reports: Mapping[str, EngineReport], now_s: float) -> Mapping[str, float]:
        """Add the decode steps since the last report to the ages. Returns them, by the engines' names."""
        steps, before = dict[str, float](), self._reported_s
        passed_s = max(1e-9, now_s - before)
        for name, report in reports.items():
            now = report.load.num_steps
            steps[name] = max(0.0, now - self._num_steps.get(name, now))
            self._num_steps[name] = now
            for attempt in report.attempts[: report.num_served(self._num_actors)]:
                attempt.age += steps[name] * (now_s - max(before, attempt.began_s)) / passed_s
        mean = sum(steps.values()) / max(1, len(steps))
        for age, began_s, ended_s in self._ended:
            self._ages_at_end.append(age + mean * (ended_s - max(before, began_s)) / passed_s)
        self._ended.clear()
        self._reported_s = now_s
        return steps


class AttemptGate:
    """Places of attempts: earlier groups first, evaluation before all. Lifecycle: `async with gate.place(priority)`
    around each attempt, `report` once a second."""

    def __init__(self, control: AdmissionControl, patience_s: float = math.inf) -> None:
        """`patience_s`: longest wait because of the limit, in seconds. Then the upper bound alone counts."""
        self.control, self._patience_s = control, patience_s
        self._under_way: set[Attempt] = set()
        self._waiting: list[Attempt] = []
        self._num_attempts = 0

    @property
    def room(self) -> int:
        """Number of attempts that may begin, less those that wait to."""
        return self.limit - len(self._under_way) - len(self._waiting)

    @property
    def num_under_way(self) -> int:
        return len(self._under_way)

    @property
    def limit(self) -> int:
        """Largest number of attempts under way."""
        return self.control.limit(self.num_under_way)

    def report(self, loads: Mapping[str, KvLoad | None], pool: EnginePool, shape: TurnShape = TurnShape()) -> None:
        """Set the limit by reports of the engines. Attempts beyond it go on. Empty: engines are being replaced."""
        if not loads:
            self.control.hold(self.num_under_way)
            return
        names, on = list(loads), dict[str, list[Attempt]]()
        for attempt in sorted(self._under_way):
            name = pool.engine_of.get(attempt.conversation) if attempt.conversation is not None else None
            name = name if name is not None else names[attempt.order % len(names)]  # it has not sampled yet
            on.setdefault(name, []).append(attempt)
        reports = {
            name: EngineReport(load, on.get(name, ()), pool.load(name)) if load is not None else None
            for name, load in loads.items()
        }
        self.control.report(reports, asyncio.get_running_loop().time(), shape)
        self._let_in()

    @asynccontextmanager
    async def place(self, priority: int = 0) -> AsyncIterator[Attempt]:
        """Wait for a place, and keep it within the block. The lowest priority comes first."""
        loop = asyncio.get_running_loop()
        self._num_attempts += 1
        attempt = Attempt(priority, self._num_attempts, loop.time(), loop.create_future())
        heapq.heappush(self._waiting, attempt)
        self._let_in()
        try:
            await attempt.may_begin
            yield attempt
        finally:
            if attempt in self._under_way:
                self._under_way.remove(attempt)
                self.control.ended(attempt, loop.time())
            else:
                self._waiting.remove(attempt)
                heapq.heapify(self._waiting)
            self._let_in()

    def _let_in(self) -> None:
        while self._waiting and len(self._under_way) < self.limit:
            self._begin(heapq.heappop(self._waiting))
        late = asyncio.get_running_loop().time() - self._patience_s
        for attempt in sorted(attempt for attempt in self._waiting if attempt.came_s < late):
            if len(self._under_way) < self.control.most:
                self._waiting.remove(attempt)
                self._begin(attempt)
        heapq.heapify(self._waiting)

    def _begin(self, attempt: Attempt) -> None:
        attempt.began_s = asyncio.get_running_loop().time()
        self._under_way.add(attempt)
        self.control.begun()
        if not attempt.may_begin.done():  # cancelled just now: its block ends at once
            attempt.may_begin.set_result(None)

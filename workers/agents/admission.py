"""Admission of attempts: as many as the KV memory of the engines allows.

    engines ─▶ a `KvLoad` each, once a second ─▶ AdmissionControl: a window an engine ─▶ the limit, their sum
    attempts ─▶ AttemptGate: those of earlier groups first, while fewer are under way than the limit

A window begins with the sequences that fit at full length, and multiplies while memory is free, until it is about to be
full. From then on it follows the memory in small steps, and loses an eighth when an engine preempts, or reads again
what it had evicted. Turns of attempts under way wait for no gate, so they go before new attempts. Memory follows a
change of the window only as attempts grow, so that all steps are as fast as attempts are long.
"""

import asyncio
import heapq
import math
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from penstock.workers.protocols import Completion, KvLoad

FULL = 0.945
"""Share of an engine's memory to be used. The rest is for what grows between two reports."""
CUT = 0.88
"""Factor of a window whose engine preempts."""
PAUSE = 0.2
"""Shortest time between two cuts, in lifetimes of an attempt."""
GAIN, MOST_GAIN = 2.0, 0.6
"""Change of a window in a lifetime, as a power of e, for all of the memory; and the largest."""
DOUBLINGS = 1.8
"""Doublings of a window in a lifetime while nothing is known of its bounds and all memory is free."""
QUEUE = 0.4
"""Waiting samples of those that an engine decodes above which more would only lengthen its queue."""
FORGET = 0.02
"""Share of what is known of lifetimes that each attempt that ends replaces."""
REREAD = 10.0
"""Tokens read again for each sampled one, above which evictions cost more than concurrency brings: a GPU reads about
ten tokens in the time in which it samples one, and so spends half of its time on them."""
SLACK_TOKENS = 64
"""Tokens of a prefix that are read again in any case: the last block is not full."""


def num_reread(num_known: int, versions: Sequence[int], completion: Completion) -> int:
    """Number of tokens that the engine has read again, as their prefix was evicted, or is on another engine.
    `num_known`: tokens of the conversation so far. `versions`: of its last token: newer weights read all of it anew."""
    if completion.num_cached is None or [*completion.versions[:1]] != [*versions]:
        return 0
    return max(0, num_known - SLACK_TOKENS - completion.num_cached)


class Lifetimes:
    """The mean lifetime of an attempt that is under way at a random moment: long ones count by their length."""

    def __init__(self) -> None:
        self._sum_s = self._sum_squares = 0.0

    def add(self, seconds: float) -> None:
        self._sum_s += seconds - FORGET * self._sum_s
        self._sum_squares += seconds**2 - FORGET * self._sum_squares

    def mean_s(self, ages: Sequence[float]) -> float:
        """Mean lifetime in seconds, at least the second between two reports. `ages`: of attempts under way, which live
        at least so long."""
        squares, total = self._sum_squares + sum(age**2 for age in ages), self._sum_s + sum(ages)
        return max(1.0, squares / total) if total else 1.0


@dataclass
class Window:
    """Attempts that one engine can have under way."""

    size: float
    num_preempted: int
    usage: float
    """Mean usage of the last quarter of half a lifetime, for the slope."""
    multiplies: bool = True
    """True until the memory was once about to be full."""
    pause: float = 0.0
    """Lifetimes until the next cut."""

    def follow(self, load: KvLoad, *, rereads: bool, is_binding: bool, life_s: float, oldest_s: float) -> None:
        """Take a report, a second after the last one. `rereads`: too much that was evicted is read again. `is_binding`:
        as many attempts are under way as may be."""
        has_preempted = load.num_preempted > self.num_preempted
        self.num_preempted = load.num_preempted
        room = FULL - self._expected(load.usage, life_s / 2, oldest_s)
        has_queue = load.num_waiting > max(1, QUEUE * load.num_running)
        self.pause -= 1 / life_s
        if has_preempted or rereads:
            self.multiplies = False
            if is_binding and self.pause <= 0:
                self.size, self.pause = max(1.0, CUT * self.size), PAUSE
                return
        self.multiplies &= room > 0
        if room > 0 and (has_queue or not is_binding):
            return
        power = max(-MOST_GAIN, min(MOST_GAIN, GAIN * room))
        if self.multiplies:
            power = math.log(2) * DOUBLINGS * (room / FULL) ** 4
        self.size = max(1.0, self.size * math.exp(power / life_s))

    def _expected(self, usage: float, ahead_s: float, oldest_s: float) -> float:
        """Usage half a lifetime ahead. As long as no lifetime is known, attempts live as long again as they have."""
        over_s = max(1.0, ahead_s / 4)
        self.usage += (usage - self.usage) / (1 + over_s)
        slope = max(0.0, usage - self.usage) / over_s
        return usage + slope * (max(ahead_s, oldest_s) if self.multiplies else ahead_s)


class AdmissionControl:
    """The number of attempts that one actor may have under way. Pure: reports in, a limit out.

    Lifecycle: `ended` for each attempt, `report` once a second. Engines that report no memory have no limit.
    """

    def __init__(self, most: int, num_actors: int = 1, limit: int | None = None) -> None:
        """`most`: upper bound. `num_actors`: environment actors that share the engines. `limit`: before the first
        report; None: `most`."""
        self.most, self._num_actors = most, num_actors
        self._windows: dict[str, Window] = {}
        self._lifetimes = Lifetimes()
        self.limit = most if limit is None else limit

    def ended(self, seconds: float) -> None:
        """Note how long an attempt was under way."""
        self._lifetimes.add(seconds)

    def report(self, loads: Mapping[str, KvLoad | None], ages: Sequence[float], reread: float = 0.0) -> int:
        """Set the limit by reports of the engines that serve now. `ages`: seconds that attempts are under way.
        `reread`: tokens read again for each token sampled."""
        if not loads:  # the engines are being replaced, and windows of theirs serve the next ones
            return self.limit
        known = {name: load for name, load in loads.items() if load is not None}
        is_binding, life_s = len(ages) >= self.limit, self._lifetimes.mean_s(ages)
        kept = {name: window for name, window in self._windows.items() if name in known}
        for name, load in known.items():
            if name in kept:
                kept[name].follow(
                    load, rereads=reread > REREAD, is_binding=is_binding, life_s=life_s, oldest_s=max(ages, default=0.0)
                )
            else:
                sizes = [window.size for window in self._windows.values()]
                size = sum(sizes) / len(sizes) if sizes else max(1.0, load.num_fitting / self._num_actors)
                kept[name] = Window(size, load.num_preempted, load.usage, multiplies=not sizes)
        for window in kept.values():
            window.size = min(window.size, float(self.most))
        self._windows = kept
        total = sum(window.size for window in kept.values())
        self.limit = max(1, min(self.most, int(total))) if len(known) == len(loads) else self.most
        return self.limit


@dataclass(frozen=True, order=True)
class _Place:
    priority: int
    order: int
    came: float
    entered: "asyncio.Future[None]" = field(compare=False)


class AttemptGate:
    """Places of attempts: earlier groups first, evaluation before all. Lifecycle: `async with gate.place(priority)`
    around each attempt, `report` once a second."""

    def __init__(self, control: AdmissionControl, patience_s: float = math.inf) -> None:
        """`patience_s`: longest wait because of the limit, in seconds. Then the upper bound alone counts."""
        self._control, self._patience_s = control, patience_s
        self._began: dict[_Place, float] = {}
        """When the attempts under way have begun."""
        self._waiting: list[_Place] = []
        self._num_places = 0

    @property
    def num_waiting(self) -> int:
        """Number of attempts that wait for a place."""
        return len(self._waiting)

    @property
    def num_under_way(self) -> int:
        return len(self._began)

    @property
    def limit(self) -> int:
        """Largest number of attempts under way."""
        return self._control.limit

    def report(self, loads: Mapping[str, KvLoad | None], reread: float = 0.0) -> None:
        """Set the limit by reports of the engines, as `AdmissionControl.report` does. Attempts beyond it go on."""
        now = asyncio.get_running_loop().time()
        self._control.report(loads, [now - began for began in self._began.values()], reread)
        self._let_in()

    @asynccontextmanager
    async def place(self, priority: int = 0) -> AsyncIterator[None]:
        """Wait for a place, and keep it within the block. The lowest priority comes first."""
        loop = asyncio.get_running_loop()
        self._num_places += 1
        place = _Place(priority, self._num_places, loop.time(), loop.create_future())
        heapq.heappush(self._waiting, place)
        self._let_in()
        try:
            await place.entered
            yield
        finally:
            if place in self._began:
                self._control.ended(loop.time() - self._began.pop(place))
            else:
                self._waiting.remove(place)
                heapq.heapify(self._waiting)
            self._let_in()

    def _let_in(self) -> None:
        now = asyncio.get_running_loop().time()
        while self._waiting and len(self._began) < self._control.limit:
            self._enter(heapq.heappop(self._waiting), now)
        for place in sorted(place for place in self._waiting if now - place.came > self._patience_s):
            if len(self._began) < self._control.most:
                self._waiting.remove(place)
                self._enter(place, now)
        heapq.heapify(self._waiting)

    def _enter(self, place: _Place, now: float) -> None:
        self._began[place] = now
        if not place.entered.done():  # cancelled just now: its block ends at once
            place.entered.set_result(None)

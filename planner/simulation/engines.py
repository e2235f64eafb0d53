"""The engines of a simulated run: each decodes its sequences together, one token each a step. They ask for groups as
rollout workers do, and write what they have sampled. Members die and are replaced, and engines join.

    room for a group ─▶ ask ─▶ leases ─▶ SimulatedEngine ─▶ write, ask again
    a fault ─▶ its leases go back (`Ledger.abandon`) ─▶ another in its place, with the newest version ─▶ ask

An engine, and what it is interrupted for:

    groups arrive ─▶ read their prompts ─▶ decode ─▶ a sequence ends ─▶ … the last of a group: its samples are done
    a version comes ─▶ the step under way ends ─▶ pause, load ─▶ read all sequences again (recompute) ─▶ decode on
                                                               └─▶ decode on (keep)
                       it takes no more groups (finish), and loads once it has ended those it has; then the next engine

There is an event only where what is decoded changes. Between two of them the engine makes so many steps as the shortest
sequence has left; how long they take follows from the first and the last of them, since a step's time grows evenly with
the context. What comes meanwhile waits for the end of the step under way.
"""

import heapq
import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random

from penstock.planner.durations import Durations
from penstock.planner.simulation.events import Clock, SimulatedStore
from penstock.planner.simulation.simulated_members import TOKEN_BYTES, SimulatedSamples
from penstock.store.ledger.group import Facts, row_ids
from penstock.store.ledger.leases import HeldLease
from penstock.store.service.wire import LeaseRequest

MOST_STEPS = 1024
"""Most steps that are taken at once: over more the time of a step may not grow evenly."""
IDLE, DECODING, READING, LOADING, GONE = range(5)


@dataclass(eq=False, slots=True)
class SampledGroup:
    """A group of samples that an engine makes."""

    lease: HeldLease | None
    """None: of a problem that is evaluated."""
    group: int
    rows: list[int]
    prompt_tokens: int
    lengths: Sequence[int]
    """Tokens of each sample, at least one."""
    stage: str
    began: int = 0
    """Number of the engine's step that makes its first tokens."""
    num_left: int = 0
    is_over: bool = False
    """True once nobody wants its samples any more."""

    @property
    def key(self) -> tuple[int, int]:
        return (-1 if self.lease is None else self.lease.id, self.group)


@dataclass(slots=True)
class EngineSeconds:
    """Seconds of an engine, and of these what it did."""

    there: float = 0.0
    decoding: float = 0.0
    reading: float = 0.0
    loading: float = 0.0


class SimulatedEngine:
    """Lifecycle: `take` and `load` at any time, `finished` is called with each group; `end` when it is gone."""

    def __init__(
        self,
        name: str,
        durations: Durations,
        clock: Clock,
        version: int,
        finished: Callable[["SimulatedEngine", SampledGroup], None],
        loaded: Callable[["SimulatedEngine", int], None],
        recomputes: bool = True,
    ) -> None:
        """`recomputes`: sequences under way are read again under new weights."""
        self.name, self.version = name, version
        self._recomputes, self._reads_again = recomputes, False
        self.num_read_again = 0
        """Tokens that were read a second time."""
        self.num_tokens = 0
        self.groups: dict[tuple[int, int], SampledGroup] = {}
        """Groups under way, by lease and group."""
        self._durations, self._clock, self._finished, self._loaded = durations, clock, finished, loaded
        self._state, self._token = IDLE, 0
        self._since = self._counted = clock.now
        """Time at which the state began, and until which its seconds are counted."""
        self._seconds = [0.0] * GONE
        """Seconds by state."""
        self._step = 0
        """Number of steps that were made."""
        self._ends: list[tuple[int, int, SampledGroup]] = []
        """Heap of the step after which each sequence ends."""
        self._serial = 0
        self._context = 0
        """Tokens of all sequences."""
        self._switches = [(0, version)]
        """Versions, each with the first step made under it."""
        self._arrived: list[SampledGroup] = []
        self._read: list[SampledGroup] = []
        self._due: int | None = None
        """Version to be loaded."""
        self._purges = False
        self._first_s = self._growth_s = 0.0
        self._planned = 0
        """Steps under way, the time of the first of them, and by how much each next one is longer."""

    def take(self, groups: Sequence[SampledGroup]) -> None:
        """Sample these groups, too."""
        self._arrived += groups
        for group in groups:
            self.groups[group.key] = group
        self._interrupt()

    def load(self, version: int) -> None:
        """Load a version of the weights, once the step under way has ended."""
        self._due = version
        if self._state == IDLE and not self._arrived:
            self._count()
            self._begin(self._clock.now)
        else:
            self._interrupt()

    def abort(self, lease: int, group: int) -> SampledGroup | None:
        """Stop with a group that another engine has sampled."""
        found = self.groups.pop((lease, group), None)
        if found is not None:
            found.is_over = self._purges = True
            self._interrupt()
        return found

    def end(self) -> None:
        """Stop for good."""
        self._count()
        self._state, self._token = GONE, self._token + 1
        self.groups.clear()

    def versions_of(self, group: SampledGroup) -> tuple[list[int], list[int]]:
        """The oldest version of each sample's tokens, and the sum of their versions."""
        if group.began >= self._switches[-1][0]:
            version = self._switches[-1][1]
            return [version] * len(group.lengths), [version * length for length in group.lengths]
        at = bisect_right(self._switches, (group.began, math.inf)) - 1
        oldest, sums = self._switches[at][1], []
        for length in group.lengths:
            end, total = group.began + length, 0
            for number, (start, version) in enumerate(self._switches[at:], at):
                last = self._switches[number + 1][0] if number + 1 < len(self._switches) else end
                total += version * max(0, min(end, last) - max(start, group.began))
            sums.append(total)
        return [oldest] * len(group.lengths), sums

    @property
    def is_busy(self) -> bool:
        return self._state in (DECODING, READING, LOADING)

    # What happens.

    def _interrupt(self) -> None:
        """Go on with something else as soon as the step under way allows it."""
        now = self._clock.now
        if self._state == IDLE:
            self._at(now, 0)
        elif self._state == DECODING:
            steps = self._steps_until(now - self._since)
            if steps < self._planned:
                self._planned = steps
                self._at(max(now, self._since + self._seconds_of(steps)), steps)

    def _at(self, time: float, steps: int) -> None:
        self._token += 1
        self._clock.at(time, self._turn, (self._token, steps))

    def _turn(self, event: tuple[int, int]) -> None:
        token, steps = event
        if token != self._token:
            return
        now, state = self._clock.now, self._state
        self._seconds[state] += now - self._counted
        self._counted = now
        if state == DECODING:
            self._advance(steps)
        elif state == READING:
            self._join()
        elif state == LOADING:
            self._serve()
        if self._purges:
            self._purge()
        self._begin(now)

    def _begin(self, now: float) -> None:
        """Begin what is next."""
        self._since = now
        if self._due is not None:
            self._state = LOADING
            self._at(now + self._durations.sync().paused_s, 0)
        elif self._reads_again:
            self._state, self._reads_again = READING, False
            groups = {group.key: group for _, _, group in self._ends}.values()
            shared = sum((group.num_left - 1) * group.prompt_tokens for group in groups)
            self.num_read_again += self._context - shared
            self._at(now + self._durations.prefill_s(self._context - shared), 0)
        elif self._arrived:
            self._state, self._read, self._arrived = READING, self._arrived, []
            self._at(now + self._durations.prefill_s(sum(group.prompt_tokens for group in self._read)), 0)
        elif self._ends:
            self._state, count = DECODING, len(self._ends)
            steps = self._ends[0][0] - self._step
            self._planned = steps = steps if steps < MOST_STEPS else MOST_STEPS
            mean, decode_s = self._context / count, self._durations.decode_s
            self._first_s = first_s = last_s = decode_s(count, mean)
            if steps > 1:
                last_s = decode_s(count, mean + steps - 1)
                self._growth_s = (last_s - first_s) / (steps - 1)
            self._at(now + steps * (first_s + last_s) / 2, steps)
        else:
            self._state = IDLE

    def _advance(self, steps: int) -> None:
        """Make steps: sequences that have all of their tokens end."""
        ends = self._ends
        self._step = step = self._step + steps
        self.num_tokens += steps * len(ends)
        self._context += steps * len(ends)
        while ends and ends[0][0] <= step:
            _, _, group = heapq.heappop(ends)
            self._context -= group.prompt_tokens + step - group.began
            group.num_left -= 1
            if not group.num_left and not group.is_over:
                del self.groups[group.key]
                self._finished(self, group)

    def _join(self) -> None:
        """Let the sequences in whose prompts were read."""
        for group in self._read:
            if group.is_over:
                continue
            group.began, group.num_left = self._step, len(group.lengths)
            for length in group.lengths:
                self._serial += 1
                heapq.heappush(self._ends, (self._step + length, self._serial, group))
            self._context += len(group.lengths) * group.prompt_tokens
        self._read = []

    def _serve(self) -> None:
        """Serve the version that was loaded. Versions under which no sequence has begun are forgotten."""
        assert self._due is not None
        self.version, self._due = self._due, None
        first = min((group.began for _, _, group in self._ends), default=self._step)
        kept = bisect_right(self._switches, (first, math.inf)) - 1
        self._switches = [*self._switches[kept:], (self._step, self.version)]
        if self._switches[-2][0] == self._step:
            del self._switches[-2]
        self._reads_again = self._recomputes and bool(self._ends)
        self._loaded(self, self.version)

    def _purge(self) -> None:
        self._purges = False
        self._arrived = [group for group in self._arrived if not group.is_over]
        self._ends = [end for end in self._ends if not end[2].is_over]
        heapq.heapify(self._ends)
        self._context = sum(group.prompt_tokens + self._step - group.began for _, _, group in self._ends)

    def count(self) -> EngineSeconds:
        """Seconds until now."""
        self._count()
        return EngineSeconds(sum(self._seconds), *self._seconds[DECODING:GONE])

    def _count(self) -> None:
        if self._state != GONE:
            self._seconds[self._state] += self._clock.now - self._counted
            self._counted = self._clock.now

    def _seconds_of(self, steps: int) -> float:
        """Seconds of the first steps of those under way."""
        return steps * self._first_s + self._growth_s * steps * (steps - 1) / 2

    def _steps_until(self, seconds: float) -> int:
        """Number of steps under way that end after `seconds`: those before, and the one that is being made."""
        if not seconds:
            return 0
        late = seconds * (1 - 1e-12)
        if self._seconds_of(self._planned - 1) < late:
            return self._planned
        base = self._first_s - self._growth_s / 2
        root = math.sqrt(max(0.0, base * base + 2 * self._growth_s * late))
        steps = int(late / base if abs(self._growth_s) < 1e-15 else (root - base) / self._growth_s) if base > 0 else 1
        while steps > 1 and self._seconds_of(steps - 1) >= late:
            steps -= 1
        while self._seconds_of(steps) < late:
            steps += 1
        return max(1, steps)


@dataclass(frozen=True)
class FleetChanges:
    """Members that die, and engines that join."""

    mean_s: float = 0.0
    """Mean time between two faults of one member, an engine or a rank; they come at random moments. 0: none."""
    replaced_s: float = 60.0
    """Seconds from a fault until another is there, which then loads the newest weights."""
    joins: tuple[tuple[float, int], ...] = ()
    """Times in seconds, each with the number of engines that join then."""


class SimulatedEngines:
    """Lifecycle: `begin` once; `load` brings each version to all of them."""

    def __init__(
        self, durations: Sequence[Durations], columns: Mapping[str, Sequence[str]], max_groups: int,
        store: SimulatedStore, samples: SimulatedSamples, changes: FleetChanges, random: Random,
        on_update: str = "recompute",
    ) -> None:  # fmt: skip
        """`durations`: of each engine; those that join are as the last one. `columns`: that each stage of engines
        writes, first the rollout's. `max_groups`: of one engine at a time."""
        self._durations, self._columns, self._max_groups = durations, columns, max_groups
        self._store, self._clock, self._rollout = store, store.clock, next(iter(columns))
        self._samples, self._changes, self._random = samples, changes, random
        self.there: dict[str, SimulatedEngine] = {}
        """Engines that serve, or start, by name."""
        self.newest = 0
        """The newest version that is sealed."""
        self.on_load: Callable[[str, int, float], None] = lambda name, version, began: None
        """Called with each engine that serves a version, and the time at which its load was due."""
        self.on_change: Callable[[str, str], None] = lambda kind, name: None
        """Called with `lost`, `replaced` or `joined`, and the engine."""
        self.num_lost = 0
        self.lent: set[str] = set()
        """Engines that evaluate: they ask for no groups, and load no newer versions."""
        self.on_finished: Callable[[SimulatedEngine, SampledGroup], None] = lambda engine, group: None
        """Called with an engine and each group or problem that it has finished, before it asks for more."""
        self.on_spare: Callable[[str], None] = lambda name: None
        """Called with an engine that was lent, has loaded a version while it is, or is lost."""
        self._served: Callable[[], None] | None = None
        self._loading: set[str] = set()
        self._load_began = 0.0
        self._on_update = on_update
        self._finishing: str | None = None
        """The engine that finishes its groups before it loads, and below those that come after it."""
        self._waiting: list[str] = []
        self._starting: set[str] = set()
        """Engines that load the newest version before they ask."""
        self._asking: set[tuple[str, str]] = set()
        self._incarnations: dict[str, int] = {}
        self._gone: list[EngineSeconds] = []
        store.superseded = self._superseded

    def begin(self) -> None:
        for index in range(len(self._durations)):
            self._ask(self._made(f"Rollout-{index}"))
        for at, count in self._changes.joins:
            self._clock.at(at, self._join, count)

    def load(self, version: int, served: Callable[[], None]) -> None:
        """Have every engine load a version. `served`: called once all that are there have it."""
        self.newest, self._served, self._loading = version, served, set(self.there) - self.lent
        self._load_began = self._clock.now
        if self._on_update == "finish":
            self._waiting = sorted(self._loading)
            self._load_next()
        else:
            for name, engine in list(self.there.items()):
                if name in self._loading:
                    engine.load(version)
        self._look()

    def _load_next(self) -> None:
        """Have the next engine take no more groups, and load once it has finished those that it has."""
        self._finishing = self._waiting.pop(0) if self._waiting else None
        if self._finishing is not None:
            self._asking -= {(self._finishing, stage) for stage in self._columns}
            self._store.retire(self._client(self._finishing))
            self._load_if_finished(self.there[self._finishing])

    def _load_if_finished(self, engine: SimulatedEngine) -> None:
        if engine.name == self._finishing and not engine.groups:
            engine.load(self.newest)

    def lend(self, names: Sequence[str]) -> None:
        """Give these engines no more groups; `on_spare` says when they have finished those that they have."""
        self.lent |= set(names)
        for name in names:
            self._asking -= {(name, stage) for stage in self._columns}
            self._store.retire(self._client(name))
            self._clock.at(self._clock.now, self.on_spare, name)

    def take_back(self, names: Sequence[str]) -> None:
        """Have lent engines load the newest version and ask for groups again."""
        for name in names:
            if name in self.lent and (engine := self.there.get(name)) is not None:
                self._starting.add(name)
                engine.load(self.newest)
        self.lent -= set(names)

    def seconds(self) -> EngineSeconds:
        """Seconds of all engines until now."""
        all_of = [*self._gone, *(engine.count() for engine in self.there.values())]
        return EngineSeconds(*(sum(getattr(one, name) for one in all_of) for name in EngineSeconds.__slots__))

    # Sampling.

    def _ask(self, engine: SimulatedEngine) -> None:
        """Ask for as many groups as there is room for, unless it has asked."""
        most = self._max_groups
        if len(engine.groups) >= most or engine.name in self.lent or engine.name == self._finishing:
            return
        for stage in self._columns:
            if (engine.name, stage) not in self._asking:
                self._asking.add((engine.name, stage))
                client = self._client(engine.name)
                request = LeaseRequest(stage, most, engine.name, 1, most, len(self._durations), client)
                self._store.ask(request, lambda leases, engine=engine, stage=stage: self._given(engine, stage, leases))  # type: ignore[misc]

    def _given(self, engine: SimulatedEngine, stage: str, leases: list[HeldLease]) -> None:
        self._asking.discard((engine.name, stage))
        residents, found = self._store.ledger.residents, []
        for lease in leases:
            for group, mask in lease.open.items():
                rows = row_ids(group, mask, residents.size)
                indices = [row % residents.size for row in rows] if stage == self._rollout else [0]
                lengths = [self._samples.length(group, sample) for sample in indices]
                prompt = residents.groups[group].prompt_tokens
                found.append(SampledGroup(lease, group, rows, prompt, lengths, stage))
        engine.take(found)
        self._ask(engine)

    def _finished(self, engine: SimulatedEngine, sampled: SampledGroup) -> None:
        if sampled.lease is None:
            self.on_finished(engine, sampled)
            self._ask(engine)
            return
        lengths, columns = list(sampled.lengths), self._columns[sampled.stage]
        if sampled.stage == self._rollout:
            oldest, sums = engine.versions_of(sampled)
            facts = Facts([TOKEN_BYTES * length for length in lengths], oldest, lengths)
            self._store.notes[sampled.group].version_sums = sums
        else:  # one response, whose text all rows of the group get
            facts = Facts([4 * lengths[0]] * len(sampled.rows))
        self._store.write(sampled.lease, sampled.stage, sampled.rows, columns, facts)
        self.on_finished(engine, sampled)
        self._ask(engine)
        self._load_if_finished(engine)

    def _superseded(self, client: str, lease: int, group: int) -> None:
        """Another engine has sampled the group."""
        engine = self.there.get(client.partition(".")[0])
        if engine is not None and engine.abort(lease, group) is not None:
            self._ask(engine)
            self._load_if_finished(engine)

    # Weights.

    def _loaded(self, engine: SimulatedEngine, version: int) -> None:
        if engine.name in self.lent:
            self.on_spare(engine.name)
        if engine.name in self._starting:
            self._starting.discard(engine.name)
            self._ask(engine)
        if engine.name == self._finishing:
            self._load_next()
            self._ask(engine)
        if engine.name in self._loading and version >= self.newest:
            self._loading.discard(engine.name)
            self.on_load(engine.name, version, self._load_began)
            self._look()

    def _look(self) -> None:
        if self._served is not None and not self._loading:
            served, self._served = self._served, None
            served()

    # Members that come and go.

    def _client(self, name: str) -> str:
        return f"{name}.{self._incarnations[name]}"

    def _made(self, name: str) -> SimulatedEngine:
        self._incarnations[name] = self._incarnations.get(name, -1) + 1
        durations = self._durations[min(int(name.rpartition("-")[2]), len(self._durations) - 1)]
        recomputes = self._on_update == "recompute"
        engine = SimulatedEngine(name, durations, self._clock, self.newest, self._finished, self._loaded, recomputes)
        self.there[name] = engine
        if self._changes.mean_s:
            lives_s = self._random.expovariate(1 / self._changes.mean_s)
            self._clock.at(self._clock.now + lives_s, self._lose, name)
        return engine

    def _lose(self, name: str) -> None:
        engine = self.there.pop(name)
        engine.end()
        self._gone.append(engine.count())
        self.num_lost += 1
        self._asking -= {(name, stage) for stage in self._columns}
        self._starting.discard(name)
        self._store.leave(self._client(name), name)
        self.on_change("lost", name)
        self.lent.discard(name)
        self.on_spare(name)
        self._waiting = [other for other in self._waiting if other != name]
        if name == self._finishing:
            self._load_next()
        self._loading.discard(name)
        self._look()
        self._clock.at(self._clock.now + self._changes.replaced_s, self._replace, name)

    def _replace(self, name: str) -> None:
        self._start(name)
        self.on_change("replaced", name)

    def _join(self, count: int) -> None:
        for _ in range(count):
            name = f"Rollout-{len(self._incarnations)}"
            self._start(name)
            self.on_change("joined", name)

    def _start(self, name: str) -> None:
        """Start an engine, which loads the newest version before it asks for anything."""
        engine = self._made(name)
        self._starting.add(name)
        engine.load(self.newest)

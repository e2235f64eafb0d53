"""The engines of a simulated run: they ask for groups as rollout workers do, and write what they have sampled. Members
that die and are replaced, and engines that join.

    room for a group ─▶ ask ─▶ leases ─▶ SimulatedEngine ─▶ write, ask again
    a fault ─▶ its leases go back (`Ledger.abandon`) ─▶ another in its place, with the newest version ─▶ ask
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from penstock.planner.durations import Durations
from penstock.planner.simulation.engine import EngineSeconds, SampledGroup, SimulatedEngine
from penstock.planner.simulation.events import Clock, SimulatedStore
from penstock.planner.simulation.members import TOKEN_BYTES, Samples
from penstock.store.ledger.group import Facts, row_ids
from penstock.store.ledger.leases import HeldLease
from penstock.store.service.wire import LeaseRequest


@dataclass(frozen=True)
class Changes:
    """Members that die, and engines that join."""

    mean_s: float = 0.0
    """Mean time between two faults of one member, an engine or a rank; they come at random moments. 0: none."""
    replaced_s: float = 60.0
    """Seconds from a fault until another is there, which then loads the newest weights."""
    joins: tuple[tuple[float, int], ...] = ()
    """Times in seconds, each with the number of engines that join then."""


@dataclass(frozen=True)
class Sampling:
    """What engines are asked for."""

    stages: tuple[str, ...]
    """Stages that engines serve."""
    columns: dict[str, tuple[str, ...]]
    """Columns that each writes."""
    max_groups: int
    """Most groups that one engine has."""


class SimulatedEngines:
    """Lifecycle: `begin` once; `load` brings each version to all of them."""

    def __init__(
        self,
        durations: Sequence[Durations],
        sampling: Sampling,
        store: SimulatedStore,
        clock: Clock,
        samples: Samples,
        changes: Changes,
        random: Random,
    ) -> None:
        """`durations`: of each engine; those that join are as the last one."""
        self._durations, self._sampling, self._store, self._clock = durations, sampling, store, clock
        self._samples, self._changes, self._random = samples, changes, random
        self.there: dict[str, SimulatedEngine] = {}
        """Engines that serve, or start, by name."""
        self.newest = 0
        """The newest version that is sealed."""
        self.told_load: Callable[[str, int, float], None] = lambda name, version, began: None
        """Told of each engine that serves a version, and since when it was to load it."""
        self.told: Callable[[str, str], None] = lambda kind, name: None
        """Told of engines that are `lost`, `replaced` or `joined`."""
        self.num_lost = 0
        self._served: Callable[[], None] | None = None
        self._loading: set[str] = set()
        self._load_began = 0.0
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
        self.newest, self._served, self._loading = version, served, set(self.there)
        self._load_began = self._clock.now
        for engine in list(self.there.values()):
            engine.load(version)
        self._look()

    def seconds(self) -> EngineSeconds:
        """Seconds of all engines until now."""
        all_of = [*self._gone, *(engine.count() for engine in self.there.values())]
        return EngineSeconds(*(sum(getattr(one, name) for one in all_of) for name in EngineSeconds.__slots__))

    # Sampling.

    def _ask(self, engine: SimulatedEngine) -> None:
        """Ask for as many groups as there is room for, unless it has asked."""
        most = self._sampling.max_groups
        if len(engine.groups) >= most:
            return
        for stage in self._sampling.stages:
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
                indices = [row % residents.size for row in rows] if stage == self._sampling.stages[0] else [0]
                lengths = [self._samples.length(group, sample) for sample in indices]
                prompt = residents.groups[group].prompt_tokens
                found.append(SampledGroup(lease, group, rows, prompt, lengths, stage))
        engine.take(found)
        self._ask(engine)

    def _finished(self, engine: SimulatedEngine, sampled: SampledGroup) -> None:
        lengths, columns = list(sampled.lengths), self._sampling.columns[sampled.stage]
        if sampled.stage == self._sampling.stages[0]:
            oldest, sums = engine.versions_of(sampled)
            facts = Facts([TOKEN_BYTES * length for length in lengths], oldest, lengths)
            self._store.notes[sampled.group].version_sums = sums
        else:  # one response, whose text is told to all rows of the group
            facts = Facts([4 * lengths[0]] * len(sampled.rows))
        self._store.write(sampled.lease, sampled.stage, sampled.rows, columns, facts)
        self._ask(engine)

    def _superseded(self, client: str, lease: int, group: int) -> None:
        """Another engine has sampled the group."""
        engine = self.there.get(client.partition(".")[0])
        if engine is not None and engine.abort(lease, group) is not None:
            self._ask(engine)

    # Weights.

    def _loaded(self, engine: SimulatedEngine, version: int) -> None:
        if engine.name in self._starting:
            self._starting.discard(engine.name)
            self._ask(engine)
        if engine.name in self._loading and version >= self.newest:
            self._loading.discard(engine.name)
            self.told_load(engine.name, version, self._load_began)
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
        engine = SimulatedEngine(name, durations, self._clock, self.newest, self._finished, self._loaded)
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
        self._asking -= {(name, stage) for stage in self._sampling.stages}
        self._starting.discard(name)
        self._store.leave(self._client(name), name)
        self.told("lost", name)
        self._loading.discard(name)
        self._look()
        self._clock.at(self._clock.now + self._changes.replaced_s, self._replace, name)

    def _replace(self, name: str) -> None:
        self._start(name)
        self.told("replaced", name)

    def _join(self, count: int) -> None:
        for _ in range(count):
            name = f"Rollout-{len(self._incarnations)}"
            self._start(name)
            self.told("joined", name)

    def _start(self, name: str) -> None:
        """Start an engine, which loads the newest version before it asks for anything."""
        engine = self._made(name)
        self._starting.add(name)
        engine.load(self.newest)

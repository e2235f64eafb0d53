"""The controller's loop of a simulated run, with the ranks of the trainer: `control/controller.py` on a virtual clock.

    wait for the batch ─▶ update ─▶ the step counts ─▶ publish ─▶ the next step
                                                          └─▶ sealed ─▶ every engine loads ─▶ `served` ─▶ credits

With `max_staleness=0` the next step waits for `served`, else only for the part of the publication that it cannot do
without. It counts once the version before is sealed, and is published once that one is served. Ranks that are lost have
their last step that counts: they publish what is not sealed again. Where engines and ranks share devices they change
turns twice a step.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Protocol

from penstock.conf.run import RunConfig
from penstock.planner.durations import Durations
from penstock.planner.simulation.engines import FleetChanges, SimulatedEngines
from penstock.planner.simulation.events import SimulatedStore
from penstock.store.ledger.rounds import Round

TRAIN, PROMPTS = "train", "prompts"
WAITING, TURNING, UPDATING, MADE, PUBLISHING, OVER = range(6)


@dataclass
class SimulatedStep:
    """One step. Times in seconds since the run began."""

    step: int
    """Number of the step, from 1."""
    began: float
    """Time from which on the ranks wait for its batch."""
    formed: float = 0.0
    taken: float = 0.0
    """Time at which the update begins: once the devices are the ranks'."""
    updated: float = 0.0
    counted: float = 0.0
    """Time at which the version before is sealed, and the store is told."""
    published: float = 0.0
    """Time at which its publication begins."""
    sealed: float = 0.0
    closed: float = 0.0
    """Time from which on the ranks wait for the next one."""
    served: float = 0.0
    """Time at which every engine serves its version."""
    waits: dict[str, float] = field(default_factory=dict)
    """Seconds that the ranks waited for each stage, on the way of the group that was complete last."""
    parts: list[list[int]] = field(default_factory=list)
    """Rows of each share of the batch; forgotten once they were counted."""
    lengths: list[list[int]] = field(default_factory=list)
    """Tokens of each of these rows, prompt included; forgotten with them."""


class Watcher(Protocol):
    """Whoever keeps account of a simulated run."""

    def trained(self, step: SimulatedStep) -> None:
        """Hear of a step that counts, while its rows are known."""

    def closed(self, step: SimulatedStep) -> None:
        """Hear that the next step does not wait for this one any more."""

    def served(self, step: SimulatedStep) -> None:
        """Hear that the step's version is served: the step is over."""


class SimulatedTrainer:
    """Lifecycle: woken by the store; `is_over` once all steps were made and their versions are served."""

    def __init__(
        self, config: RunConfig, store: SimulatedStore, durations: Durations, engines: SimulatedEngines | None
    ) -> None:
        """`engines`: None where nothing is sampled."""
        self._num_steps, self._num_ranks = config.trainer.max_steps, config.trainer.num_ranks
        self._num_shares = config.trainer.num_shares
        self._is_synchronous, self._store, self._clock = config.max_staleness == 0, store, store.clock
        self._durations, self._engines = durations, engines
        self.load = engines.load if engines is not None else None
        """Has engines load a version, and calls back once the store is to hear that it is served."""
        self._turn_s = durations.turn_s() if engines is not None else 0.0
        self.watchers: list[Watcher] = []
        self.on_change: Callable[[str, str], None] = lambda kind, name: None
        """Called with `lost` or `replaced`, and the name of the first rank."""
        self.num_lost = 0
        self.num_served = 0
        self._made: Round | None = None
        self._step = SimulatedStep(1, 0.0)
        self._published: SimulatedStep | None = None
        """The step whose version is on its way."""
        self._is_sealed = True
        self._awaits_version = False
        """True if a step counts before the version of the one before it is served."""
        self._phase, self._token, self._writing = WAITING, 0, 0
        self._back_at = 0.0
        """Time at which ranks that were lost are there again."""
        store.rounds[TRAIN] = self._look

    @property
    def is_over(self) -> bool:
        return self.num_served == self._num_steps

    @property
    def num_working(self) -> int:
        """Number of ranks that train at the moment."""
        return self._num_ranks if self._phase == UPDATING else 0

    def lose_ranks_at_random(self, changes: FleetChanges, random: Random) -> None:
        """Have ranks die: all start again together, and the step under way is taken again."""

        def lose(_: None) -> None:
            self.lose_ranks(changes.replaced_s)
            again()

        def again() -> None:
            wait_s = random.expovariate(self._num_ranks / changes.mean_s)
            self._clock.at(max(self._clock.now, self._back_at) + wait_s, lose)

        if changes.mean_s:
            again()

    # One step after the other.

    def _look(self) -> None:
        """Take the batch, if it is there and the ranks wait for it."""
        if self._phase != WAITING or self._clock.now < self._back_at:
            return
        ledger = self._store.ledger
        if self._turn_s:
            if ledger.rounds.may_form(ledger.residents.stage(TRAIN)):
                self._formed()
                self._go(TURNING, self._turn_s, self._take)
        else:
            self._take()

    def _go(self, phase: int, seconds: float, action: Callable[[], None]) -> None:
        """Be in a phase for so long, unless the ranks are lost meanwhile."""
        self._phase, self._token = phase, self._token + 1
        token = self._token
        self._clock.at(self._clock.now + seconds, lambda _: action() if token == self._token else None)

    def _take(self) -> None:
        ledger, step, now = self._store.ledger, self._step, self._clock.now
        made, effects = ledger.lease_shared(TRAIN, step.step - 1, self._num_shares, 0, "Trainer", now)
        self._store.carry_out(effects)
        if made is None:
            self._phase = WAITING
            return
        self._made = made
        step.taken = now
        if not self._turn_s:
            self._formed()
        groups, size = ledger.residents.groups, ledger.residents.size
        step.parts = [ledger.rows_of_rank(made, rank) for rank in range(self._num_shares)]
        step.lengths = []
        for part in step.parts:
            lengths = []
            for row in part:
                group = groups[row // size]
                index = row % size
                lengths.append(group.prompt_tokens + group.context_tokens[index] + group.response_tokens[index])
            step.lengths.append(lengths)
        self._go(UPDATING, self._durations.update_s(step.lengths), self._updated)

    def _formed(self) -> None:
        """Note that the batch is there, and what its last group had waited for."""
        step, at = self._step, self._step.began
        step.formed, step.waits = self._clock.now, {}
        times = self._store.notes[self._store.last_group].written
        for stage, end in sorted(times.items(), key=lambda one: one[1]):
            if end > at:
                step.waits[stage] = end - at
                at = end
        if step.formed > at:
            step.waits[PROMPTS] = step.formed - at

    def _updated(self) -> None:
        self._step.updated, self._phase = self._clock.now, MADE
        if self._is_sealed:
            self._count()

    def _count(self) -> None:
        """Have the step count, and publish what it has made: versions are published one after the other."""
        step, made = self._step, self._made
        assert made is not None
        step.counted, self._phase = self._clock.now, PUBLISHING
        for watcher in self.watchers:
            watcher.trained(step)
        for rank in range(self._num_shares):
            self._store.carry_out(self._store.ledger.complete_shared(made.lease_id, rank))
        self._store.ledger.next_deadline()  # leases that are over go from the order of deadlines
        self._made, step.parts, step.lengths = None, [], []
        if self._published is None:
            self._publish()
        else:
            self._awaits_version = True

    def _publish(self) -> None:
        step = self._published = self._step
        step.published, self._awaits_version = self._clock.now, False
        if self._engines is None:
            self._served()
        else:
            self._is_sealed = False
            if self._clock.now >= self._back_at:
                self._write(step)

    def _write(self, step: SimulatedStep) -> None:
        """Write the version, until it is sealed or the ranks are lost."""
        self._writing += 1
        now, writing, synced = self._clock.now, self._writing, self._durations.sync()

        def sealed(_: None) -> None:
            if writing == self._writing:
                self._sealed(step)

        def taken(_: None) -> None:
            if writing == self._writing and not step.closed:
                self._close(step)

        if not self._is_synchronous:
            self._clock.at(now + min(synced.critical_s, synced.published_s), taken)
        self._clock.at(now + synced.published_s, sealed)

    def _sealed(self, step: SimulatedStep) -> None:
        step.sealed, self._is_sealed = self._clock.now, True
        self._clock.at(self._clock.now + self._turn_s, lambda _: self._load(step))
        if self._phase == MADE:
            self._count()

    def _load(self, step: SimulatedStep) -> None:
        assert self.load is not None
        self.load(step.step, self._served)

    def _served(self) -> None:
        step = self._published
        assert step is not None
        self._published, step.served = None, self._clock.now
        self._store.carry_out(self._store.ledger.served(step.step))
        self.num_served = step.step
        for watcher in self.watchers:
            watcher.served(step)
        if self._is_synchronous or self._engines is None:
            self._close(step)
        elif self._awaits_version:
            self._publish()

    def _close(self, step: SimulatedStep) -> None:
        """Begin the next step."""
        now = step.closed = self._clock.now
        for watcher in self.watchers:
            watcher.closed(step)
        if step.step == self._num_steps:
            self._phase = OVER
            return
        self._step, self._phase = SimulatedStep(step.step + 1, now), WAITING
        self._look()

    def lose_ranks(self, replaced_s: float) -> None:
        """Lose a rank: the batch under way goes back, and is formed again once all ranks are back."""
        if self._phase == OVER and self._is_sealed:
            return
        self.num_lost += 1
        self.on_change("lost", "Trainer-policy-0")
        self._back_at = self._clock.now + replaced_s
        if not self._is_sealed:
            self._writing += 1  # what was written of it is nothing
        if self._phase in (TURNING, UPDATING, MADE):
            self._token += 1
            self._phase, self._made = WAITING, None
            _, effects = self._store.ledger.settle(TRAIN)
            self._store.carry_out(effects)
        self._clock.at(self._back_at, lambda _: self._back())

    def _back(self) -> None:
        if self._clock.now >= self._back_at:
            self.on_change("replaced", "Trainer-policy-0")
            if self._published is not None and not self._is_sealed:
                self._write(self._published)
            self._look()

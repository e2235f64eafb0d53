"""The members of a simulated run besides engines and ranks of the trainer: prompts, rewards, computed columns, scorers.

Prompts ─ credits ─▶ groups      StageActor ─ one lease after the other      ScorerTeam ─ one round after the other
"""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from penstock.conf.errors import ConfigError
from penstock.planner.durations import Durations
from penstock.planner.simulation.events import SimulatedStore
from penstock.store.ledger.group import Facts, row_ids
from penstock.store.ledger.leases import HeldLease
from penstock.store.service.wire import LeaseRequest
from penstock.store.spec import StageSpec

MOST_UNITS = 64
"""Most units of a lease, as workers ask for: `max_units` of theirs."""
TOKEN_BYTES = 12
"""Bytes of a sampled token in the store: its id, log-probability and version. A token of a prompt has a third."""


@dataclass(frozen=True)
class SimulatedSamples:
    """What a simulated run samples, the same whatever else happens."""

    length: Callable[[int, int], int]
    """Function from a group and a sample of it to the tokens of its response, at least one: `Lengths.of`."""
    prompt_tokens: int = 128
    """Tokens of each prompt."""
    dropped: float = 0.0
    """Share of its units that each filter of the dataflow drops: what it decides by is not simulated."""

    def __post_init__(self) -> None:
        if not 0 <= self.dropped < 1:
            raise ConfigError(f"--dropped {self.dropped:g}: a filter must leave something. Say a share of 0 to 1.")


class SimulatedPrompts:
    """Puts a group whenever there is a credit for one. Lifecycle: woken by the store."""

    def __init__(self, store: SimulatedStore, samples: SimulatedSamples, brings_responses: bool) -> None:
        """`brings_responses`: the rows come with their responses, and nothing is sampled."""
        self._store, self._samples, self._brings_responses = store, samples, brings_responses
        store.wake_prompts = self._put

    def _put(self) -> None:
        group = self._store.ledger.residents.next_group
        while True:
            tokens = self._samples.prompt_tokens
            response = self._samples.length(group, 0) if self._brings_responses else 0
            if self._store.admit(tokens * TOKEN_BYTES // 3, tokens, response) is None:
                return
            group += 1


def tokens_of(store: SimulatedStore, rows: list[int]) -> int:
    """Tokens of prompts and responses."""
    residents = store.ledger.residents
    total = 0
    for row in rows:
        group = residents.groups[row // residents.size]
        total += group.prompt_tokens + group.response_tokens[row % residents.size]
    return total


class StageResults:
    """What a stage writes. `dropped`: share of its units that a filter drops, by the luck of `random`."""

    def __init__(
        self, store: SimulatedStore, stage: StageSpec, samples: SimulatedSamples, reason: str, random: Random
    ) -> None:
        """`reason`: of a filter's drops; empty for other stages."""
        self.store, self.stage, self._samples = store, stage, samples
        self._dropped, self._reason, self._random = samples.dropped if reason else 0.0, reason, random
        self._makes_responses = "response_ids" in stage.writes

    def write(self, lease: HeldLease) -> None:
        """Write the results of all rows of a lease that are open."""
        size, rows = self.store.ledger.residents.size, list[int]()
        for group, mask in list(lease.open.items()):
            found = row_ids(group, mask, size)
            if self._dropped:
                found = self._kept(lease, found)
            rows += found
        if not rows:
            return
        facts = Facts([4] * len(rows))
        if self._makes_responses:
            lengths = [self._samples.length(row // size, row % size) for row in rows]
            facts = Facts([4 * length for length in lengths], response_tokens=lengths)
        self.store.write(lease, self.stage.name, rows, self.stage.writes, facts)

    def _kept(self, lease: HeldLease, rows: list[int]) -> list[int]:
        units = [[row] for row in rows] if self.stage.unit == "sample" else [rows]
        lost = [row for unit in units if self._random.random() < self._dropped for row in unit]
        if lost:
            self.store.carry_out(self.store.ledger.drop(lease.id, self.stage.name, lost, self._reason))
        return [row for row in rows if row not in lost]


class StageActor:
    """An actor of a stage: takes what is free, up to `MOST_UNITS` at a time. Lifecycle: `ask` once."""

    def __init__(self, name: str, results: StageResults, durations: Durations) -> None:
        self.name, self.stage, self.busy_s = name, results.stage.name, 0.0
        self._store, self._clock, self._durations, self._results = (
            results.store,
            results.store.clock,
            durations,
            results,
        )
        self._request = LeaseRequest(self.stage, MOST_UNITS, name, client=name)

    def ask(self) -> None:
        self._store.ask(self._request, self._begin)

    def _begin(self, leases: list[HeldLease]) -> None:
        rows = [row for lease in leases for row in self._store.ledger.rows_of(lease)]
        seconds = self._durations.stage_s(self.stage, len(rows), tokens_of(self._store, rows))
        self.busy_s += seconds
        if seconds:
            self._clock.at(self._clock.now + seconds, self._finish, leases)
        else:
            self._finish(leases)

    def _finish(self, leases: list[HeldLease]) -> None:
        for lease in leases:
            self._results.write(lease)
        self.ask()


class ScorerTeam:
    """All ranks of a model that is not trained: they share rounds, and the slowest decides. Lifecycle: woken by the
    store."""

    def __init__(self, owner: str, results: StageResults, durations: Durations, num_shares: int) -> None:
        """`owner`: name of the first rank. `num_shares`: ranks that get rows of their own."""
        self._owner, self.stage, self._store = owner, results.stage.name, results.store
        self._clock, self._durations, self._results = results.store.clock, durations, results
        self._num_shares, self._number, self._is_busy = num_shares, 0, False
        self._store.rounds[self.stage] = self._look

    def _look(self) -> None:
        ledger = self._store.ledger
        if self._is_busy or not ledger.residents.stage(self.stage).num_free:
            return
        made, effects = ledger.lease_shared(
            self.stage, self._number, self._num_shares, MOST_UNITS, self._owner, self._clock.now
        )
        self._store.carry_out(effects)
        if made is None:
            return
        self._store.granted(made.lease_id, self.stage, self._owner)
        self._is_busy = True
        parts = [part for rank in range(self._num_shares) if (part := ledger.rows_of_rank(made, rank))]
        tokens = [tokens_of(self._store, part) for part in parts]
        seconds = max(self._durations.stage_s(self.stage, len(p), t) for p, t in zip(parts, tokens, strict=True))
        self._clock.at(self._clock.now + seconds, self._finish, made.lease_id)

    def _finish(self, lease_id: int) -> None:
        if (lease := self._store.ledger.residents.leases.held.get(lease_id)) is not None:
            self._results.write(lease)
        self._number += 1
        self._is_busy = False
        self._look()

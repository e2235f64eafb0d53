"""The store's rounds as all ranks of a model take them: every rank has its share of a round, or none goes on with it.

    begin ─▶ number of the first round     take ─▶ this rank's share of a round, once every rank has its own

A rank that computed alone would wait for the others in a collective. So ranks tell each other the outcome of their
requests before anything is computed: a store that is gone, or rows on a node that does not answer.
"""

import time
from dataclasses import dataclass
from typing import Any, Protocol

from penstock.conf.errors import LeaseExpired, PartnerGone, PenstockError
from penstock.store.client.lease import SharedLease
from penstock.store.client.sync import SyncStoreClient
from penstock.store.errors import RowsLost, RowsUnreachable

PAUSE_S = 1.0
"""Seconds before a round is asked for again whose rows lie on a node that does not answer."""
HAVE, CLOSED, OVER, UNREADABLE, FAILED = range(5)
"""Outcomes of a request."""


class Peers(Protocol):
    """This rank among the ranks of its model: `ranks.Ranks`, or `Alone`."""

    @property
    def rank(self) -> int: ...
    @property
    def data_rank(self) -> int: ...
    @property
    def num_data_ranks(self) -> int: ...
    @property
    def reports_rows(self) -> bool: ...
    def gather_ranks(self, value: Any) -> list[Any]: ...


@dataclass(frozen=True)
class Alone:
    """The only rank."""

    rank: int = 0
    data_rank: int = 0
    """Index of this rank's share of the rows; several ranks may have the same."""
    num_data_ranks: int = 1
    """Number of shares."""
    reports_rows: bool = True
    """False for a rank whose rows another rank reports."""

    def gather_ranks(self, value: Any) -> list[Any]:
        return [value]


ALONE = Alone()


@dataclass(frozen=True)
class Outcome:
    """The outcome of one rank's request."""

    kind: int
    error: str = ""
    number: int = 0
    gives_up: bool = False
    """True if the rank could not read its rows for so long that it gives up."""


class SharedRounds:
    """The rounds of one stage. Every method is collective: all ranks return alike, or all raise. A rank without an
    error of its own raises `PartnerGone`, which names the rank that has one."""

    def __init__(self, stage: str, peers: Peers, *, max_units: int = 0, moves_on: bool = False) -> None:
        """`moves_on`: a round that is over gives way to the next one."""
        self._stage = stage
        self._peers = peers
        self._max_units = max_units
        self._moves_on = moves_on

    def begin(self, store: SyncStoreClient) -> int:
        """Return the number of the first round. Rows under way, of ranks whose place these take, go back."""
        number, failure = 0, None
        try:
            number = store.settle(self._stage) if self._peers.rank == 0 else 0
        except PenstockError as error:
            failure = error
        mine = Outcome(HAVE, number=number) if failure is None else Outcome(FAILED, str(failure))
        return self._told(mine, failure)[0].number

    def take(self, store: SyncStoreClient, number: int) -> SharedLease | None:
        """Return this rank's share of round `number`, or of a later one. Waits until it is formed; None when the store
        has closed. Rows that cannot be read go back and are asked for again, for as long as a lease lasts."""
        unreadable_since: float | None = None
        while True:
            lease: SharedLease | None = None
            failure: PenstockError | None = None
            try:
                lease = store.lease_shared(
                    self._stage, number, self._peers.data_rank, self._peers.num_data_ranks, self._max_units
                )
                mine = Outcome(CLOSED if lease is None else HAVE)
            except (RowsUnreachable, RowsLost) as error:
                failure, unreadable_since = error, unreadable_since or time.monotonic()
                gives_up = time.monotonic() - unreadable_since > store.spec().lease_timeout_s
                mine = Outcome(UNREADABLE, str(error), gives_up=gives_up)
            except PenstockError as error:
                failure, is_over = error, isinstance(error, LeaseExpired) and self._moves_on
                mine = Outcome(OVER if is_over else FAILED, str(error))
            outcomes = self._told(mine, failure)
            kinds = {outcome.kind for outcome in outcomes}
            if kinds == {HAVE}:
                return lease
            if UNREADABLE in kinds:
                time.sleep(PAUSE_S)
                number = self.begin(store)
            elif OVER in kinds:
                number += 1
            else:
                return None

    def _told(self, mine: Outcome, failure: PenstockError | None) -> list[Outcome]:
        """Outcomes of every rank. Raises if one of them cannot go on."""
        outcomes: list[Outcome] = self._peers.gather_ranks(mine)
        for rank, outcome in enumerate(outcomes):
            if outcome.kind == FAILED or outcome.gives_up:
                if failure is not None:
                    raise failure
                raise PartnerGone(f"rank {rank} has no rows of stage {self._stage!r}: {outcome.error}")
        return outcomes

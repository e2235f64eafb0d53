"""Groups that come in, as credits allow."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from penstock.store.data.blocks import Block, Blocks
from penstock.store.data.intake import Intake
from penstock.store.data.layout import SentBatch
from penstock.store.errors import MissingColumn, StoreClosed, StoreError, UnknownColumn
from penstock.store.ledger.admission import check_group_bytes
from penstock.store.ledger.effects import Effects
from penstock.store.ledger.facts import Facts
from penstock.store.ledger.ledger import Ledger
from penstock.store.service.messages import WITHDRAWN
from penstock.store.service.waiting.wait_queue import WaitQueue


@dataclass
class _UnderWay:
    """A client's put that waits."""

    withdrawn: set[int] = field(default_factory=set)
    """Tickets of the groups that were withdrawn."""
    has_left: bool = False
    """True once the client has left."""


class Puts:
    """The puts of all clients. Lifecycle: `put` in any number of clients, `wake` whenever a group may be admitted,
    `close`."""

    def __init__(
        self,
        ledger: Ledger,
        blocks: Blocks,
        intake: Intake,
        clock: Callable[[], float],
        schedule: Callable[[], None],
        carry_out: Callable[[Effects], None],
        admitted: Callable[[int], None],
    ) -> None:
        """Prepare the queue. `schedule`: has `wake` called soon. `carry_out`: does what the ledger's events ask for.
        `admitted`: told of each group."""
        self._spec, self._ledger = ledger.spec, ledger
        self._blocks, self._intake = blocks, intake
        self._clock, self._schedule, self._carry_out = clock, schedule, carry_out
        self._admitted = admitted
        self._queue = WaitQueue(schedule)
        self._under_way: dict[str, _UnderWay] = {}
        """Puts that wait, by client."""
        self._source: str | None = None
        """The only client that may put; None: any."""
        self._closed = ""

    def __len__(self) -> int:
        """Number of puts that wait."""
        return len(self._queue)

    async def put(
        self, names: list[str], sent: SentBatch, facts: Facts, client: str, tickets: Sequence[int]
    ) -> list[int]:
        """Put groups: see `Store.put`."""
        mine = self._under_way[client] = _UnderWay()
        try:
            block = self._intake.block(await self._intake.ready(sent), len(facts.row_bytes))
            self._blocks.pin(block)
            try:
                return await self._admitted_all(names, block, facts, client, tickets, mine)
            finally:
                self._blocks.unpin(block)
        finally:
            if self._under_way.get(client) is mine:
                del self._under_way[client]

    async def _admitted_all(
        self, names: list[str], block: Block, facts: Facts, client: str, tickets: Sequence[int], mine: _UnderWay
    ) -> list[int]:
        num_groups = len(facts.row_bytes)
        admitted: list[int] = []

        def check() -> None:
            if reason := self._refusal(client, mine):
                raise StoreError(f"{num_groups - len(admitted)} groups were not admitted: {reason}.")

        def admit() -> list[int] | None:
            check()
            if block.is_gone:
                raise StoreError(
                    f"{num_groups - len(admitted)} groups waited to be admitted and are gone with the node that they "
                    "were on. Put them again."
                )
            while len(admitted) < num_groups:
                number = len(admitted)
                if tickets and tickets[number] in mine.withdrawn:
                    admitted.append(WITHDRAWN)
                    continue
                group, effects = self._ledger.admit(
                    self._clock(),
                    facts.row_bytes[number],
                    _at(facts.prompt_tokens, number),
                    _at(facts.response_tokens, number),
                )
                if group is None:
                    break
                self._blocks.add_group(group, block, number, names)
                self._carry_out(effects)
                self._admitted(group)
                admitted.append(group)
            return admitted if len(admitted) == num_groups else None

        self._check_source(names)
        check_group_bytes(self._spec.max_bytes, facts.row_bytes)
        check()
        done = await self._queue.wait(admit, client)
        if done is None:
            check()
            raise StoreClosed(
                f"the store is closed ({self._closed}); {num_groups - len(admitted)} groups were not admitted."
            )
        return done

    def withdraw(self, client: str, ticket: int) -> None:
        """Withdraw the groups of that ticket that are not admitted yet. Those that are stay."""
        if client in self._under_way:
            self._under_way[client].withdrawn.add(ticket)
            self._schedule()

    def become_source(self, client: str) -> None:
        """Admit no other client's groups from now on, nor what waits of theirs."""
        self._source = client
        for other in self._under_way.keys() - {client}:
            self._queue.withdraw(other)

    def left(self, client: str) -> None:
        """Give up a put that no client waits for any more."""
        if client in self._under_way:
            self._under_way[client].has_left = True
            self._queue.withdraw(client)

    @property
    def under_way(self) -> list[str]:
        """Clients whose put waits."""
        return list(self._under_way)

    def wake(self) -> None:
        """Let the next put try."""
        self._queue.wake_first()

    def close(self, reason: str) -> None:
        """Close the queue: puts that wait, and those that come, raise `StoreClosed`."""
        self._closed = reason
        self._queue.close()

    def _refusal(self, client: str, under_way: _UnderWay) -> str:
        """The reason why no more of a client's groups are admitted, if that is so."""
        if self._source not in (None, client):
            return "another client is the source of groups now"
        return "the client has left" if under_way.has_left else ""

    def _check_source(self, names: list[str]) -> None:
        if self._closed:
            raise StoreClosed(f"the store is closed ({self._closed}) and takes no more groups.")
        for name in self._spec.source_columns:
            if name not in names:
                raise MissingColumn(
                    f"a group lacks source column {name!r}. Give {', '.join(self._spec.source_columns)} for each."
                )
        for name in names:
            if name not in self._spec.source_columns:
                raise UnknownColumn(
                    f"the source writes no column {name!r}, only {', '.join(self._spec.source_columns)}."
                )


def _at(values: list[int] | None, position: int) -> int:
    return values[position] if values is not None else 0

"""The execution of what events ask for: values are freed at once, callers woken once for all events of a turn of the
loop.

    event of the ledger ─ Effects ─▶ carry_out ─▶ blocks
                                         └─ soon ─▶ consumers, ranks, puts: those that there may be something for

Waiting callers use it too, when what they wait for may have changed.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

from penstock.store.data.blocks import Blocks
from penstock.store.ledger.effects import Effects


class LeaseWaiters(Protocol):
    """Consumers that wait for leases of one stage."""

    def wake(self) -> None: ...


class RoundWaiters(Protocol):
    """Ranks that wait for rounds of one stage."""

    def wake(self, *, moved: bool) -> None: ...


class Pump:
    """The execution of effects. Lifecycle: `connect` once, then `carry_out` after each event."""

    def __init__(self, blocks: Blocks) -> None:
        self._blocks = blocks
        self._due = Effects()
        """Effects whose callers are to be woken at the end of this turn of the event loop."""
        self._is_scheduled = False

    def connect(
        self,
        consumers: Sequence[LeaseWaiters],
        ranks: Sequence[RoundWaiters],
        wake_puts: Callable[[], None],
        settled: Callable[[], None],
        answered: Callable[[list[tuple[int, int]]], None],
    ) -> None:
        """Connect the waiting callers. `consumers`, `ranks`: in the order of the stages. `settled`: called after each
        wake-up. `answered`: told of groups that another lease has answered."""
        self._consumers, self._ranks = consumers, ranks
        self._wake_puts, self._settled, self._answered = wake_puts, settled, answered
        self.every_stage = (1 << len(consumers)) - 1

    def carry_out(self, effects: Effects) -> None:
        """Free the values now, wake the callers soon."""
        for group, mask in effects.freed:
            self._blocks.free(group, mask)
        for group, columns in effects.cleared:
            self._blocks.clear(group, columns)
        if effects.answered:
            self._answered(effects.answered)
        due = self._due
        due.stages |= effects.stages
        due.rounds |= effects.rounds
        due.credits |= effects.credits
        if not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._wake)

    def schedule(self) -> None:
        """Schedule a wake-up that no event has asked for; the deadline of a lease may be nearer."""
        self.carry_out(Effects())

    def wake_stage(self, index: int) -> None:
        """Wake a stage for what the ledger does not know: a caller came or left, or is waited for no more."""
        self.carry_out(Effects(stages=1 << index))

    def wake_all_stages(self) -> None:
        self.carry_out(Effects(stages=self.every_stage))

    def wake_puts(self) -> None:
        self.carry_out(Effects(credits=True))

    def _wake(self) -> None:
        self._is_scheduled = False
        due, self._due = self._due, Effects()
        for index, (consumers, ranks) in enumerate(zip(self._consumers, self._ranks, strict=True)):
            moved = bool(due.rounds >> index & 1)
            if due.stages >> index & 1:
                consumers.wake()
            if moved or due.stages >> index & 1:
                ranks.wake(moved=moved)
        if due.credits:
            self._wake_puts()
        self._settled()

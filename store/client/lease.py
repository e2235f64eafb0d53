"""Leases: the rows of a stage that a worker holds, to be computed and written; and a stream of them, of which the next
ones are fetched while the present one is computed.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import numpy as np

from penstock.store.data.rows import Rows

Values = dict[str, Any]
"""Values by column, one a row: a list or `[N]` array; for ragged columns a list of lists or of `[T_i]` arrays."""


@dataclass(frozen=True)
class Lease:
    """Rows to compute for a stage. `rows` has the columns that the stage reads. `version`: the newest that every engine
    served when it was granted."""

    id: int
    stage: str
    rows: Rows
    version: int = 0


@dataclass(frozen=True)
class Share:
    """The name of one rank's part of a round: `lease` is the round's, `rank` whose part."""

    lease: int
    rank: int


@dataclass(frozen=True)
class SharedLease(Lease):
    """A rank's share of a round; `rows` may be empty. `version`: the one that the step begins with (train)."""

    round: int = 0
    rank: int = 0

    @property
    def share(self) -> Share:
        return Share(self.id, self.rank)


def ids_of(row_ids: "Sequence[int] | np.ndarray") -> list[int]:
    """Row ids as the store takes them."""
    return list(map(int, row_ids.tolist() if isinstance(row_ids, np.ndarray) else row_ids))


class LeaseStream:
    """All leases of a stage until the store closes.

        async with client.leases("reward", max_units=16, owner="reward-0", ahead=1) as leases:
            async for lease in leases:
                ...

    Leaving the block gives back what was fetched and not yet handed out, and raises what fetching ahead raised, unless
    the block itself raised. What is fetched ahead is renewed like any other lease, and no other worker can work on it:
    keep `ahead` small where units are long and workers are many.
    """

    def __init__(
        self,
        ask: Callable[[int], Awaitable[list[Lease] | None]],
        release: Callable[[Lease], Awaitable[None]],
        ahead: int,
    ) -> None:
        """Prepare a stream. `ask(n)`: up to n leases, at least one; None when the store has closed. `release`: gives
        one back."""
        self._ask = ask
        self._release = release
        self._ahead = ahead
        self._ready: deque[Lease] = deque()
        self._asking: asyncio.Task[list[Lease] | None] | None = None
        self._closed = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            failures = await self._stop_asking()
        finally:  # also when the caller is cancelled meanwhile
            given_back = await self._give_back()
        if kind is None and (failures := failures + given_back):
            raise failures[0]

    async def _stop_asking(self) -> list[BaseException]:
        """Stop fetching. A request under way is withdrawn, or its leases have come and are ready. Returns the error if
        it failed."""
        if self._asking is None:
            return []
        self._asking.cancel()
        (leases,) = await asyncio.gather(self._asking, return_exceptions=True)
        if not isinstance(leases, BaseException):
            self._ready.extend(leases or [])
            return []
        return [] if isinstance(leases, asyncio.CancelledError) else [leases]

    async def _give_back(self) -> list[BaseException]:
        """Give each lease back, even if another cannot be. Returns the errors."""
        fetched, self._ready = self._ready, deque()
        results = await asyncio.gather(*map(self._release, fetched), return_exceptions=True)
        return [result for result in results if result is not None]

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Lease:
        self._fetch()
        if not self._ready and self._asking is not None:
            await self._asking
            self._fetch()
        if not self._ready:
            raise StopAsyncIteration
        return self._ready.popleft()

    def _fetch(self) -> None:
        """Take what has come, and ask for what is missing."""
        if self._asking is not None and self._asking.done():
            leases, self._asking = self._asking.result(), None
            self._closed = self._closed or leases is None
            self._ready.extend(leases or [])
        missing = 1 + self._ahead - len(self._ready)
        if self._asking is None and missing > 0 and not self._closed:
            self._asking = asyncio.ensure_future(self._ask(missing))

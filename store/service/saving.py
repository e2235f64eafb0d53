"""A cut of the store, from the moment that it is taken until it is on disk.

    cut ─ slices between other calls, and each group before it changes ─▶ whole ─ a thread ─▶ on disk ─ slices ─▶ let go

Whatever the store does meanwhile, what is written is the state of the moment; no call waits for more than a slice.
"""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from penstock.store.data.blocks import Blocks
from penstock.store.data.segments import Segments
from penstock.store.errors import StoreError
from penstock.store.ledger.ledger import Ledger
from penstock.store.ledger.state import Cut, scalars
from penstock.store.service import snapshot

T = TypeVar("T")
SLICE = 2048
"""Number of rows whose groups are copied, or let go, at a time: a few milliseconds."""


class Taken:
    """A cut. Its values stay until `let_go`: the rows may end while it is written."""

    def __init__(self, ledger: Ledger, blocks: Blocks) -> None:
        self._ledger, self._blocks = ledger, blocks
        self._scalars, self._copied = scalars(ledger), blocks.begin_copy()
        self._slice = max(1, SLICE // ledger.spec.group_size)
        self._cut = Cut(ledger.residents, lambda group: blocks.keep(group, self._copied))
        self._copying = asyncio.get_running_loop().create_task(self._copy())

    async def whole(self) -> None:
        """Wait until all is copied."""
        await asyncio.shield(self._copying)

    def write(self, root: str, number: int, keep: int, resolve: snapshot.Resolve | None) -> str:
        """Write the cut, in a thread, once it is whole. Returns its path."""
        cut, spec = self._cut, self._ledger.spec
        state = snapshot.State(spec, self._scalars, cut.groups, cut.with_source, self._copied)
        return str(snapshot.write(root, number, state, resolve, keep=keep))

    def stop(self) -> None:
        """Copy no more. A second time changes nothing."""
        self._copying.cancel()
        self._cut.close()

    async def let_go(self) -> None:
        self.stop()
        while self._blocks.let_go(self._copied, self._slice):
            await asyncio.sleep(0)

    async def _copy(self) -> None:
        while self._cut.copy(self._slice):
            await asyncio.sleep(0)


class Saving:
    """The cuts of a store. Lifecycle: `cut` and `write` in turns; a cut that is not written gives way to the next."""

    def __init__(self, ledger: Ledger, blocks: Blocks, segments: Segments | None) -> None:
        self._ledger, self._blocks, self._segments = ledger, blocks, segments
        self._cut: Taken | None = None
        self._under_way: set[asyncio.Task[Any]] = set()

    def cut(self) -> None:
        """Take the state of this moment."""
        if self._cut is not None:
            self._cut.stop()
            self._begin(self._cut.let_go())
        self._cut = Taken(self._ledger, self._blocks)

    async def write(self, root: str, number: int, keep: int, is_apart: bool) -> str:
        """Write the last cut, or else the state of this moment, in a thread. Returns its path. `is_apart`: the state of
        this moment, and the last cut is another's. A caller that is cancelled does not end it. Raises `StoreError`."""
        taken = None if is_apart else self._cut
        if not is_apart:
            self._cut = None
        writing = self._begin(self._write(taken or Taken(self._ledger, self._blocks), root, number, keep))
        return await asyncio.shield(writing)

    async def _write(self, taken: Taken, root: str, number: int, keep: int) -> str:
        try:
            await taken.whole()
            resolve = self._segments.reader() if self._segments is not None else None
            return await asyncio.to_thread(taken.write, root, number, keep, resolve)
        except OSError as error:
            raise StoreError(f"{root}: the store's snapshot cannot be written: {error}") from None
        finally:
            await taken.let_go()

    def _begin(self, work: Coroutine[Any, Any, T]) -> "asyncio.Task[T]":
        task = asyncio.get_running_loop().create_task(work)
        self._under_way.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: "asyncio.Task[Any]") -> None:
        self._under_way.discard(task)
        if not task.cancelled():
            task.exception()  # whoever still waits for it hears of it

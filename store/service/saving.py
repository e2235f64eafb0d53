"""A cut of the store, from the moment that it is taken until it is on disk. Used by `store.py`."""

import asyncio

from penstock.store.data.blocks import Blocks
from penstock.store.data.segments import Held, Segments
from penstock.store.errors import StoreError
from penstock.store.ledger.ledger import Ledger
from penstock.store.service import snapshot


class Saving:
    """Lifecycle: `cut` and `write` in turns; a cut that is not written gives way to the next."""

    def __init__(self, ledger: Ledger, blocks: Blocks, segments: Segments | None) -> None:
        self._ledger, self._blocks, self._segments = ledger, blocks, segments
        self._cut: tuple[snapshot.Cut, Held | None] | None = None

    def cut(self) -> None:
        """Take the state of this moment."""
        if self._cut is not None and self._cut[1] is not None:
            self._cut[1].let_go()
        # Held from now on: the rows may end, and their segments go, while it is written.
        held = self._segments.hold(self._blocks.refs()) if self._segments is not None else None
        self._cut = snapshot.cut(self._ledger.spec, self._ledger, self._blocks), held

    async def write(self, root: str, number: int, keep: int, is_apart: bool) -> str:
        """Write the last cut, or else the state of this moment, in a thread; its path. `is_apart`: the state of this
        moment, and the last cut is another's. Raises `StoreError`."""
        before = self._cut if is_apart else None
        if is_apart:
            self._cut = None
        if self._cut is None:
            self.cut()
        assert self._cut is not None
        (state, held), self._cut = self._cut, before
        resolve = held.resolve if held is not None else None
        try:
            return str(await asyncio.to_thread(snapshot.write, root, number, state, resolve, keep=keep))
        except OSError as error:
            raise StoreError(f"{root}: the store's snapshot cannot be written: {error}") from None
        finally:
            if held is not None:
                held.let_go()

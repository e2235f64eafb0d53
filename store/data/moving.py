"""Files of segments are written, moved to disk, looked for and removed in a thread, one after the other.

    result = await thread.run(work, undo)    the event loop goes on meanwhile

`move` runs in the thread of its caller.
"""

import asyncio
import os
import shutil
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from penstock.store.data.segment_book import writer_of
from penstock.store.errors import StoreClosed

T = TypeVar("T")
CLOSED = "the store is closed: it writes and moves no files any more."
COPIED_AT_ONCE = 1 << 20
"""Bytes copied at once."""


class FileThread:
    """The thread for files. Lifecycle: `run` any number of times, `close`."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "segments")
        self._is_closed = False

    async def run(self, work: Callable[[], T], undo: Callable[[T | None], None]) -> T:
        """Run work in the thread. Returns what it returns, or raises what it raises. `undo`: called on the loop once
        the work has ended, if its caller waits no more; with its result, None if it has failed. Raises `StoreClosed`
        where it will not be begun any more."""
        if self._is_closed:
            raise StoreClosed(CLOSED)
        running = asyncio.get_running_loop().run_in_executor(self._thread, work)
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            if running.cancelled():
                raise StoreClosed(CLOSED) from None
            running.add_done_callback(
                lambda ended: undo(None if ended.cancelled() or ended.exception() else ended.result())
            )
            raise

    def begin(self, work: Callable[[], None]) -> None:
        """Begin work that no caller waits for, and that does not fail. Raises `StoreClosed` as `run` does."""
        if self._is_closed:
            raise StoreClosed(CLOSED)
        self._thread.submit(work)

    def close(self) -> None:
        """Wait for what is under way; what is not is not begun. A second time changes nothing."""
        self._is_closed = True
        self._thread.shutdown(cancel_futures=True)


def move(source: Path, target: Path) -> None:
    """Move a file to another file system. A target that exists is another's, and stays. Raises `OSError`; then the
    source is as before and there is nothing new."""
    descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with open(descriptor, "wb") as copy, source.open("rb") as original:
            shutil.copyfileobj(original, copy, COPIED_AT_ONCE)
    except OSError:
        target.unlink(missing_ok=True)
        raise
    source.unlink()


def written_by(writers: Collection[str], places: Sequence[Path]) -> list[Path]:
    """Files of these writers; none of a place that is gone."""
    found: list[Path] = []
    for place in places:
        try:
            found += [place / name for name in os.listdir(place) if writer_of(name) in writers]
        except OSError:
            continue
    return found

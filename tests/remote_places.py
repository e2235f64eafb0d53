"""File systems behind URLs, for tests of what is brought there."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import fsspec
from fsspec.implementations.memory import MemoryFileSystem


class Flaky(MemoryFileSystem):
    """`flaky://…`: in memory, and of some names it takes nothing."""

    protocol = "flaky"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    refused: ClassVar[dict[str, Exception]] = {}
    """Errors by the last part of a name, or by `*` for all names."""
    hangs: ClassVar[threading.Event] = threading.Event()
    """Cleared: nothing ends."""
    written: ClassVar[list[str]] = []
    """Names in the order in which they came."""

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(super()._strip_protocol(str(path).removeprefix("flaky://")))

    def put_file(self, lpath: str, rpath: str, **options: Any) -> None:
        self._look(rpath)
        super().put_file(lpath, rpath, **options)

    def pipe_file(self, path: str, value: bytes, **options: Any) -> None:
        self._look(path)
        super().pipe_file(path, value, **options)

    def _look(self, path: str) -> None:
        self.hangs.wait(30)
        name = path.rpartition("/")[2]
        if (error := self.refused.get(name, self.refused.get("*"))) is not None:
            raise error
        self.written.append(path.removeprefix("/bucket/"))


@contextmanager
def flaky() -> Iterator[type[Flaky]]:
    fsspec.register_implementation("flaky", Flaky, clobber=True)
    Flaky.hangs.set()
    try:
        yield Flaky
    finally:
        Flaky.hangs.set()
        Flaky.store.clear()
        Flaky.pseudo_dirs[:] = [""]
        Flaky.refused.clear()
        Flaky.written.clear()

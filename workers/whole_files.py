"""Files that exist whole or not at all: written beside their place, then renamed into it.

Readers see the old file or the new one, and so does the next process if this one is killed. For files that another
process may read meanwhile: run directories, checkpoints, publications.
"""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def replacing(target: Path, *, synced: bool = False) -> Iterator[Path]:
    """Yield the file to write within the block; it becomes `target` at its end. `synced`: only once its bytes are on
    the disk, so that it is whole after a power cut too."""
    part = part_of(target)
    try:
        yield part
        if synced:
            _sync(part)
        part.replace(target)
    except BaseException:
        with contextlib.suppress(OSError):  # the file system may be away
            part.unlink()
        raise


def part_of(target: Path) -> Path:
    """The path where a file is written until it is whole."""
    return target.with_name(f".{target.name}.part")


def write_whole(target: Path, text: str, *, synced: bool = False) -> None:
    with replacing(target, synced=synced) as part:
        part.write_text(text, encoding="utf-8")


def _sync(file: Path) -> None:
    descriptor = os.open(file, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

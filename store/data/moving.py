"""Files from shared memory to disk. Used by `segments.py` and `far/server.py`."""

import os
import shutil
from pathlib import Path

COPIED_AT_ONCE = 1 << 20
"""Bytes."""


def move(source: Path, target: Path) -> None:
    """To another file system. A target that exists is another's, and stays. Raises `OSError`; then the source is as
    before and there is nothing new."""
    descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with open(descriptor, "wb") as copy, source.open("rb") as original:
            shutil.copyfileobj(original, copy, COPIED_AT_ONCE)
    except OSError:
        target.unlink(missing_ok=True)
        raise
    source.unlink()

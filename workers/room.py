"""The free space before a write, for the error message if the write fails."""

import contextlib
import shutil
from pathlib import Path


class Room:
    """Lifecycle: `look` before writing, `too_little` if that has failed."""

    def __init__(self, needed_bytes: int) -> None:
        self._needed_bytes = needed_bytes
        self._free_bytes: int | None = None

    def look(self, directory: str | Path) -> None:
        """Note the free space where a directory is or is to be made."""
        path = Path(directory)
        with contextlib.suppress(OSError):
            existing = next(place for place in (path, *path.absolute().parents) if place.is_dir())
            self._free_bytes = shutil.disk_usage(existing).free

    def too_little(self, advice: str) -> str:
        """Text to add to the error where little space may be the cause: others want some of it as well."""
        if self._free_bytes is None or self._free_bytes > 2 * self._needed_bytes:
            return ""
        return f". Its part alone needs {self._needed_bytes:,} bytes, and {self._free_bytes:,} were free. {advice}"

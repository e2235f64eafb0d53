"""Rows of a JSON-lines file, found by byte offset and parsed when they are asked for.

Every error names the file and the line.
"""

import json
from array import array
from pathlib import Path
from typing import Any

from penstock.conf.errors import DataError, suggest


class JsonLines:
    """Objects of a file, one a line; blank lines count as lines but not as rows.

    Raises `DataError` if the file is missing or empty, or holds fewer than one object.
    """

    def __init__(self, path: str, key: str = "data.path") -> None:
        self.path = Path(path).expanduser()
        _check_file(self.path, key)
        self._offsets = array("Q")
        self._lines = array("Q")
        with self.path.open("rb") as file:
            offset = 0
            for number, line in enumerate(file, start=1):
                if line.strip():
                    self._offsets.append(offset)
                    self._lines.append(number)
                offset += len(line)
            size = offset
        if not self._offsets:
            raise DataError(f"{key}={path}: the file has {size} bytes and no rows; one JSON object a line is due.")
        self._file = self.path.open("rb")

    def __len__(self) -> int:
        return len(self._offsets)

    def where(self, index: int) -> str:
        return f"{self.path} line {self._lines[index]}"

    def row(self, index: int) -> dict[str, Any]:
        """Parse a row. Raises `DataError` if the line is not valid JSON, or no object."""
        self._file.seek(self._offsets[index])
        line = self._file.readline()
        try:
            value = json.loads(line.decode("utf-8-sig"))
        except UnicodeDecodeError as error:
            raise DataError(f"{self.where(index)}: not UTF-8 ({error}). Convert the file to UTF-8.") from None
        except json.JSONDecodeError as error:
            shown = line.decode("utf-8", "replace").strip()
            raise DataError(
                f"{self.where(index)}: not valid JSON ({error.msg} at character {error.colno}): {shown[:80]!r}. "
                "The file must hold one JSON object a line."
            ) from None
        if not isinstance(value, dict):
            raise DataError(
                f"{self.where(index)}: a JSON {type(value).__name__}, where an object with named columns is due."
            )
        return value


def _check_file(path: Path, key: str) -> None:
    if path.is_dir():
        raise DataError(f"{key}={path}: a folder; name the .jsonl file in it.")
    if not path.is_file():
        folder = path.parent
        if not folder.is_dir():
            raise DataError(f"{key}={path}: there is no folder {folder.resolve()}.")
        near = [other.name for other in folder.iterdir() if other.is_file()]
        hint = suggest(path.name, near) if near else "; the folder is empty."
        raise DataError(f"{key}={path}: there is no such file{hint}")

"""Pictures of a dataset's rows: however a row gives them, the bytes of PNG or JPEG, in the order of their places in the
prompt, each of which the text marks with `<image>`.

images   [b"…", "a.png", "https://…", {"bytes": b"…", "path": "a.png"}, …]       a column: verl, Hugging Face's `Image`
prompt   "<image>How many?"                                                      places in the text, as verl has them
content  [{"type": "image"}, {"type": "text", "text": "How many?"}]              places as parts of a message, as TRL's
content  [{"type": "image_url", "image_url": {"url": "data:image/png;…"}}, …]    pictures as parts of a message

Pictures that nothing marks stand before the user's first text, as TRL places them.
"""

import asyncio
import errno
import ipaddress
import socket
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from penstock.conf.errors import DataError
from penstock.workers.pictures.prompt_pictures import as_png, bytes_of_url, encoded, is_image
from penstock.workers.runtime.url_files import is_url

MARK = "<image>"
FETCH_S = 30.0
"""Seconds for a picture at a URL."""
MOST_FETCHED_BYTES = 2**25
_FIELDS = ("image", "image_url", "url", "path", "bytes", "base64")
"""Keys of a message's part that may hold its picture."""


def in_parts(text: str, *, has_pictures: bool) -> list[dict[str, str]]:
    """The content of a message as chat templates of models that see read it. Without pictures a mark is text.

    >>> in_parts("<image>How many?", has_pictures=True)
    [{'type': 'image'}, {'type': 'text', 'text': 'How many?'}]
    """
    parts: list[dict[str, str]] = []
    for number, piece in enumerate(text.split(MARK) if has_pictures else [text]):
        parts += [{"type": "image"}] * (number > 0)
        parts += [{"type": "text", "text": piece}] * bool(piece)
    return parts


@dataclass
class RowPictures:
    """The pictures of one row. Lifecycle: `content` of each message in order, then `placed`."""

    where: str
    """File and line, for messages."""
    folder: Path
    """Folder that paths are relative to."""
    column: Sequence[Any] | None = None
    """Values of the row's column of pictures, in order; None if no column is named."""
    private_urls: bool = False
    """Whether URLs may name private addresses."""
    _found: list[bytes] = field(default_factory=list)
    _num_taken: int = 0
    """Number of the column's values that have a place."""

    def content(self, parts: Sequence[Any], where: str) -> str:
        """The content of a message in parts as text, its pictures marked. Raises `DataError`."""
        return "".join(self._part(part, f"{where}, part {number}") for number, part in enumerate(parts, 1))

    def placed(self, texts: list[str], first: int = 0) -> tuple[list[str], tuple[bytes, ...]]:
        """The prompt's texts with a mark for every picture, and the pictures in this order. `first`: number of the text
        that pictures without a mark stand before. Raises `DataError` where marks and pictures do not fit."""
        if self.column is None and not self._found:
            return texts, ()
        column, num_marks = self.column or (), sum(text.count(MARK) for text in texts)
        if not num_marks:
            texts = [MARK * len(column) * (number == first) + text for number, text in enumerate(texts)]
            num_marks = len(column)
        num_pictures = len(self._found) + len(column) - self._num_taken
        if num_marks != num_pictures or (self._found and self._num_taken < len(column)):
            raise DataError(
                f"{self.where}: {num_marks} places in the prompt ({MARK}, or parts of messages), and {num_pictures} "
                "pictures. Each picture has one place."
            )
        if self._found:
            return texts, tuple(self._found)
        return texts, tuple(self._read(value, f"picture {number}") for number, value in enumerate(column, 1))

    def _part(self, part: Any, where: str) -> str:
        if isinstance(part, str):
            return part
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if kind == "text" and isinstance(part.get("text"), str):
            return str(part["text"])
        if kind not in ("image", "image_url"):
            raise DataError(f"{where}: {kind!r} is neither a text nor a picture, and nothing else is read.")
        value = next((part[name] for name in _FIELDS if part.get(name) is not None), None)
        if value is None:
            column = self.column or ()
            if self._num_taken == len(column):
                raise DataError(
                    f"{where}: it names no picture, and of the row's column {len(column)} are taken: set "
                    "data.columns.pictures to the column that has them."
                )
            value = column[self._num_taken]
            self._num_taken += 1
        self._found.append(self._read(value, "its picture", where))
        return MARK

    def _read(self, value: Any, what: str, where: str = "") -> bytes:
        where = f"{where or self.where}: {what}"
        try:
            return encoded(_bytes_of(value, self.folder, self.private_urls))
        except (OSError, ValueError, SyntaxError) as error:
            raise DataError(f"{where} cannot be read: {error}") from None
        except _Unknown as error:
            raise DataError(
                f"{where} is {error}, where bytes, a path, a URL or a picture of Hugging Face's (bytes, path) is due."
            ) from None


class _Unknown(Exception):
    """A value that is no picture."""


def _bytes_of(value: Any, folder: Path, private_urls: bool) -> bytes:
    """The bytes that a value stands for, whatever they hold. Raises `_Unknown`, `OSError`, `ValueError`."""
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    if isinstance(value, Mapping):
        inner = next((value[name] for name in ("bytes", "url", "path") if value.get(name) is not None), None)
        if inner is None:
            raise _Unknown("nothing")
        return _bytes_of(inner, folder, private_urls)
    if is_image(value):
        return as_png(value)
    if not isinstance(value, str):
        raise _Unknown("nothing" if value is None else f"{type(value).__name__} {value!r:.60}")
    if value.startswith("data:"):
        return bytes_of_url(value)
    if not is_url(value):
        return (folder / Path(value).expanduser()).read_bytes()
    if not value.startswith(("http://", "https://")):
        raise ValueError(f"{value.partition('://')[0]:.20}: is not fetched: http and https are")
    with ThreadPoolExecutor(1) as threads:  # the caller's thread may have an event loop
        return threads.submit(asyncio.run, _fetched(value, private_urls)).result()


async def _fetched(url: str, private_urls: bool) -> bytes:
    """The file at a URL. Raises `OSError`, `ValueError`."""
    connector = aiohttp.TCPConnector(socket_factory=None if private_urls else _public_socket)
    timeout = aiohttp.ClientTimeout(FETCH_S)
    found = bytearray()
    try:
        async with (
            aiohttp.ClientSession(connector=connector, timeout=timeout, raise_for_status=True) as session,
            session.get(url) as answer,
        ):
            async for part in answer.content.iter_chunked(2**16):
                found += part
                if len(found) > MOST_FETCHED_BYTES:
                    raise ValueError(f"{url} has more than {MOST_FETCHED_BYTES:,} bytes")
    except TimeoutError:
        raise OSError(f"{url} did not come within {FETCH_S:g} s") from None
    except aiohttp.ClientError as error:
        raise OSError(f"{url}: {error}") from None
    return bytes(found)


def _public_socket(info: Any) -> socket.socket:
    """The socket for an address that a name, or a redirect, has led to. Raises `OSError` for a private one."""
    family, kind, protocol, _, address = info
    if not ipaddress.ip_address(address[0].partition("%")[0]).is_global:
        raise OSError(errno.EACCES, f"{address[0]} is a private address, which data.private_urls=true allows")
    return socket.socket(family, kind, protocol)

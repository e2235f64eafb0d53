"""Pictures in requests, as each protocol has them: their bytes, whatever format these are of. Nothing is fetched: a
picture comes with its request. Pure.

    chat/completions   {"type": "image_url", "image_url": {"url": "data:image/png;base64,…"}}
    responses          {"type": "input_image", "image_url": "data:image/png;base64,…"}
    messages           {"type": "image", "source": {"type": "base64", "data": "…"}}
"""

from collections.abc import Callable, Sequence
from typing import Any

from penstock.workers.gateway.http.fields import Fields
from penstock.workers.pictures.encoding import bytes_of_base64, bytes_of_url

SEND = "send the picture itself, as data:image/png;base64,…"
PictureReader = Callable[[Fields], bytes]
"""Function that reads a part of a message. Raises `BadRequest`."""


def of_chat(part: Fields) -> bytes:
    return _of_url(part.need_object("image_url"), "url")


def of_responses(part: Fields) -> bytes:
    part.refuse("file_id", f"files are not kept here: {SEND} in image_url.")
    return _of_url(part, "image_url")


def of_messages(block: Fields) -> bytes:
    source = block.need_object("source")
    if (kind := source.need_text("type")) != "base64":
        raise source.wrong("type", f"{kind} cannot be read, as nothing is fetched: send the picture itself, as base64.")
    return _decoded(source, "data", bytes_of_base64)


def in_order(pieces: Sequence[str | bytes], between: str) -> str | list[dict[str, Any]]:
    """The content of a message of texts and pictures: one text, or with pictures a list of parts. `between`: what
    stands between two texts that follow each other.

    >>> in_order(["a", "b", b"1"], "-")
    [{'type': 'text', 'text': 'a-b'}, {'type': 'image', 'image': b'1'}]
    """
    parts: list[dict[str, Any]] = []
    for piece in pieces:
        if isinstance(piece, bytes):
            parts.append({"type": "image", "image": piece})
        elif parts and parts[-1]["type"] == "text":
            parts[-1]["text"] += between + piece
        else:
            parts.append({"type": "text", "text": piece})
    if any(part["type"] == "image" for part in parts):
        return parts
    return str(parts[0]["text"]) if parts else ""


def _of_url(holder: Fields, name: str) -> bytes:
    url = holder.need_text(name)
    if not url.startswith("data:"):
        raise holder.wrong(name, f"{url.partition(':')[0]:.20}: is not fetched: {SEND}.")
    return _decoded(holder, name, bytes_of_url)


def _decoded(holder: Fields, name: str, decode: Callable[[str], bytes]) -> bytes:
    try:
        return decode(holder.need_text(name))
    except ValueError as error:
        raise holder.wrong(name, f"{error}.") from None

"""Pictures in the messages of a conversation, whatever form a caller has given them in. Pure.

    given    [screen, "What is it?"]                  bytes, an image of PIL's, or parts as OpenAI's protocol has them
    kept     [{"type": "image", "image": b"…", "hash": "…"}, {"type": "text", "text": "What is it?"}]
    written  [{"type": "image"}, {"type": "text", "text": "What is it?"}]                          by chat templates

A content without pictures is kept as text.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from penstock.conf.errors import DataError
from penstock.workers.gateway.formats.conversation import Message
from penstock.workers.pictures.encoding import as_png, bytes_of_url, encoded, is_image, url_of
from penstock.workers.pictures.processor import hash_of

IMAGE, TEXT = "image", "text"


def kept(messages: Sequence[Message]) -> list[Message]:
    """The messages as they are kept. Raises `DataError` for a part that is neither text nor a picture."""
    return [
        {**message, "content": _kept(content, f"message {number}")}
        if isinstance(content := message.get("content"), list | tuple)
        else message
        for number, message in enumerate(messages, 1)
    ]


def pictures_in(messages: Sequence[Message]) -> list[bytes]:
    """The pictures of messages that are kept, in the order of their places."""
    return [
        part["image"]
        for message in messages
        if not isinstance(content := message.get("content"), str)
        for part in content or ()
        if part["type"] == IMAGE
    ]


def written_for_template(message: Message, *, in_parts: bool) -> dict[str, Any]:
    """A message that is kept as a chat template reads it. `in_parts`: texts are lists of parts, too, as templates of
    many models that see expect them."""
    content = message.get("content")
    if isinstance(content, str) or content is None:
        said = [{"type": TEXT, "text": content or ""}] if content or not message.get("tool_calls") else []
        return {**message, "content": said} if in_parts else dict(message)
    parts = [{"type": IMAGE} if part["type"] == IMAGE else part for part in content]
    return {**message, "content": parts}


def as_openai(messages: Sequence[Message]) -> list[Message]:
    """The messages as clients of OpenAI's chat completions send them: what JSON is made of."""
    return [
        message
        if isinstance(content := message["content"], str)
        else {**message, "content": [_as_openai(part) for part in content]}
        for message in messages
    ]


def _as_openai(part: Mapping[str, Any]) -> Mapping[str, Any]:
    return {"type": "image_url", "image_url": {"url": url_of(part["image"])}} if part["type"] == IMAGE else part


def _kept(parts: Sequence[Any], where: str) -> str | list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for number, part in enumerate(parts, 1):
        one = _part(part, f"{where}, part {number}")
        if one["type"] == TEXT and found and found[-1]["type"] == TEXT:
            found[-1] = {"type": TEXT, "text": found[-1]["text"] + one["text"]}
        else:
            found.append(one)
    if any(part["type"] == IMAGE for part in found):
        return found
    return str(found[0]["text"]) if found else ""


def _part(part: Any, where: str) -> dict[str, Any]:
    fields = part if isinstance(part, Mapping) else {}
    kind = fields.get("type", TEXT)
    if isinstance(part, str) or (kind == TEXT and isinstance(fields.get("text"), str)):
        return {"type": TEXT, "text": part if isinstance(part, str) else fields["text"]}
    picture = fields.get("image", fields.get("image_url")) if fields else part
    if isinstance(picture, Mapping):
        picture = picture.get("url")
    try:
        data = _encoded(picture)
    except (OSError, ValueError, SyntaxError) as error:
        raise DataError(f"{where}: its picture cannot be read: {error}") from None
    if data is None:
        what = kind if fields else type(part).__name__
        raise DataError(
            f"{where}: {what!r} is neither a text nor a picture (bytes, an image of PIL's, a data: URL), and nothing "
            "else is read."
        )
    return {"type": IMAGE, "image": data, "hash": hash_of(data)}


def _encoded(picture: Any) -> bytes | None:
    """The picture as PNG or JPEG; None for what is none."""
    if isinstance(picture, bytes | bytearray | memoryview):
        return encoded(bytes(picture), reads_pixels=False)
    if is_image(picture):
        return as_png(picture)
    if isinstance(picture, str) and picture.startswith("data:"):
        return encoded(bytes_of_url(picture), reads_pixels=False)
    return None

"""Conversations: messages, tools and pictures as clients send them; the interface of the formats that write them as
tokens; and the key by which a conversation is found that continues an answered one. Pure.

Clients send all messages each time, as they have kept them. Two messages are the same if the model would read the same:
role, text, pictures, and calls of tools. Fields that harnesses add for themselves (ids, empty fields, annotations,
cache marks, how arguments are spaced) make no difference.

    given    [screen, "What is it?"]                  bytes, an image of PIL's, or parts as OpenAI's protocol has them
    kept     [{"type": "image", "image": b"…", "hash": "…"}, {"type": "text", "text": "What is it?"}]
    written  [{"type": "image"}, {"type": "text", "text": "What is it?"}]                          by chat templates

A content without pictures is kept as text.
"""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from penstock.conf.errors import DataError
from penstock.workers.agents.trajectory import ToolCall, Turn
from penstock.workers.pictures.processor import hash_of
from penstock.workers.pictures.prompt_pictures import as_png, bytes_of_url, encoded, is_image, url_of

Message = Mapping[str, Any]
"""A message: {role, content}, of the assistant also {reasoning_content, tool_calls}, of a tool also {tool_call_id,
name}. Its content is text; with pictures it is a list of parts, see above."""
Tools = Sequence[Mapping[str, Any]]
"""Tools as OpenAI describes them: {type: function, function: {name, description, parameters}}."""


Key = bytes
"""The digest of a conversation: a sampler keeps two for each of its turns, and conversations are long."""
SHORT_ID = re.compile(r"[a-zA-Z0-9]{9}")
"""Pattern of the ids of calls that Mistral's templates accept; those of other models accept anything."""
IMAGE, TEXT = "image", "text"


@dataclass(frozen=True)
class ParsedAnswer:
    """The sampled tokens, read as a message."""

    message: Message
    calls: Sequence[ToolCall] = ()
    problem: str = ""
    """The reason why a call could not be read, for the model; empty if there was none."""


def call_id(turn: int, index: int) -> str:
    """The id of a call, a pure function of its place in its attempt: some templates write ids into prompts, which must
    be the same when an attempt is repeated. `turn`: its id; below 0 for an untrained turn.

    >>> call_id(2, 0), call_id(-1, 3)
    ('c00002000', 'a00001003')
    """
    return f"{'c' if turn >= 0 else 'a'}{abs(turn):05d}{index:03d}"


def tool_call(id: str, name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """A call in the form that templates take: arguments are an object, where OpenAI's protocol has text."""
    return {"id": id, "type": "function", "function": {"name": name, "arguments": dict(arguments)}}


class ConversationFormat(Protocol):
    """A format, by which the gateway writes conversations, with one placeholder a picture."""

    @property
    def refusal(self) -> str:
        """The reason why no conversation with tools is taken; empty where they are."""

    def describe_tools(self) -> str:
        """How calls of tools are read, and what prompts leave out of them."""

    def prompt_ids(self, messages: Sequence[Message], tools: Tools) -> list[int]:
        """Tokens of the conversation, up to the start of the next answer."""

    def next_prompt_ids(
        self, turn: Turn, before: Sequence[Message], new: Sequence[Message], tools: Tools
    ) -> list[int] | None:
        """All tokens of `turn`, as they were sampled, and `new` messages after them, up to the start of the next
        answer. `before`: the messages that the turn has answered. None: the conversation cannot continue so, as the
        template now writes the earlier messages in another way."""

    def forced(self, tools: Tools, name: str) -> Mapping[str, Any]:
        """The structure of an answer that calls the tool of this name (`tool_calls.py`). Raises `SamplingError`."""

    def read(
        self, token_ids: Sequence[int], tools: Tools, prompt_ids: Sequence[int] = (), turn: int = 0
    ) -> ParsedAnswer:
        """Read what was sampled. `prompt_ids`: the prompt before it, which may have begun the thinking. `turn`: its id,
        from which the ids of its calls are made."""


def history_key(messages: Sequence[Message], tools: Tools) -> Key:
    """The key of a conversation, equal for conversations that are the same."""
    said = [[_canonical(message) for message in messages], [_tool(tool) for tool in tools]]
    return hashlib.blake2b(json.dumps(said, sort_keys=True, default=str).encode(), digest_size=16).digest()


def text_of(content: Any) -> str:
    """The text of a message's content: text, or parts of text."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, Sequence):
        return "".join(str(part.get("text", "")) if isinstance(part, Mapping) else str(part) for part in content)
    return str(content)


def _canonical(message: Message) -> list[Any]:
    calls = [_canonical_call(call) for call in message.get("tool_calls") or ()]
    content = message.get("content")
    return [message.get("role"), text_of(content).strip(), calls, *_with_pictures(content)]


def _with_pictures(content: Any) -> list[Any]:
    """Texts and hashes of pictures in their order; nothing for a content that has no pictures."""
    parts = [part for part in content if isinstance(part, Mapping)] if isinstance(content, list) else []
    has_some = any("hash" in part for part in parts)
    return [[part.get("hash") or part["text"].strip() for part in parts]] if has_some else []


def _canonical_call(call: Mapping[str, Any]) -> list[Any]:
    function = call.get("function", call)
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError):
            return [function.get("name"), arguments]
    return [function.get("name"), arguments]


def _tool(tool: Mapping[str, Any]) -> Any:
    function = tool.get("function", {})
    return [function.get("name"), function.get("description"), function.get("parameters")]


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

"""Requests of clients, whatever their protocol: JSON whose values are of the type that is due, or `BadRequest` names
the field; what the protocols share; the server-sent events by which an answer is streamed; and the interface of a
protocol. Pure.

Options that are refused, and those that have no effect, are listed in `client_protocols.py`. Pictures come with their
request, and nothing is fetched:

    chat/completions   {"type": "image_url", "image_url": {"url": "data:image/png;base64,…"}}
    responses          {"type": "input_image", "image_url": "data:image/png;base64,…"}
    messages           {"type": "image", "source": {"type": "base64", "data": "…"}}
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.workers.agents.gateway.client_errors import BadRequest, ClientFailure, as_openai
from penstock.workers.agents.gateway.conversation import Message
from penstock.workers.agents.gateway.tool_calls import ANY
from penstock.workers.agents.trajectory import Turn
from penstock.workers.pictures.prompt_pictures import bytes_of_base64, bytes_of_url

MOST_VALUES = 2**20
"""Most values of a body: their number, and not the length of texts and pictures, is what parsing costs."""
SEND = "send the picture itself, as data:image/png;base64,…"
GUIDED = ("json", "regex", "choice", "grammar")
COMMENT = b": the turn is being sampled\n\n"
"""Comment that is no event: clients skip it, and know that the connection lives."""
NUM_PIECES = 4
"""Number of deltas that a text is cut into. The whole text is there when the first one is sent."""


def parsed(body: bytes) -> "Fields":
    """The object of a request's body."""
    if has_many(body):
        raise BadRequest(f"the body has more than {MOST_VALUES:,} values: leave out what is no message or tool.")
    try:
        value = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"the body is no JSON: {error}.") from None
    if not isinstance(value, Mapping):
        raise BadRequest(f"the body is a JSON object, not {_kind(value)}.")
    return Fields(value)


def has_many(text: bytes) -> bool:
    """Return whether a text in JSON has more than `MOST_VALUES`."""
    return sum(map(text.count, (b",", b"[", b"{"))) > MOST_VALUES


class Fields:
    """Fields of one object. An absent one or null is None; `need_…` raise for that, too."""

    def __init__(self, value: Mapping[str, Any], path: str = "") -> None:
        """`path`: place of the object in the request, such as messages[2]."""
        self.value, self.path = value, path

    def __contains__(self, name: str) -> bool:
        return self.value.get(name) is not None

    def raw(self, name: str) -> Any:
        return self.value.get(name)

    def at(self, name: str) -> str:
        return f"{self.path}.{name}" if self.path else name

    def wrong(self, name: str, text: str, code: str = "") -> BadRequest:
        return BadRequest(text, self.at(name), code)

    def text(self, name: str) -> str | None:
        return self._of(name, str, "text")

    def need_text(self, name: str) -> str:
        return str(self._needed(name, self.text(name)))

    def flag(self, name: str) -> bool:
        """The flag; False if it is absent."""
        return bool(self._of(name, bool, "true or false"))

    def number(self, name: str, low: float, high: float = math.inf) -> float | None:
        value = self.value.get(name)
        if value is None:
            return None
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not low <= value <= high or value == math.inf:
            within = f"of at least {low:g}" if high == math.inf else f"from {low:g} to {high:g}"
            raise self.wrong(name, f"must be a number {within}, not {_shown(value)}.")
        return float(value)

    def whole(self, name: str, low: int) -> int | None:
        value = self.value.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or value < low:
            raise self.wrong(name, f"must be a whole number of at least {low}, not {_shown(value)}.")
        return value

    def object(self, name: str) -> "Fields | None":
        value = self._of(name, Mapping, "an object")
        return Fields(value, self.at(name)) if value is not None else None

    def need_object(self, name: str) -> "Fields":
        found: Fields = self._needed(name, self.object(name))
        return found

    def objects(self, name: str) -> "list[Fields]":
        """The objects; empty if they are absent."""
        values = self._of(name, list, "a list") or []
        for index, value in enumerate(values):
            if not isinstance(value, Mapping):
                raise self.wrong(f"{name}[{index}]", f"must be an object, not {_kind(value)}.")
        return [Fields(value, self.at(f"{name}[{index}]")) for index, value in enumerate(values)]

    def need_objects(self, name: str) -> "list[Fields]":
        """The objects, at least one."""
        found = self.objects(name)
        if not found:
            raise self.wrong(name, "is missing or empty.")
        return found

    def texts(self, name: str) -> list[str] | None:
        """The texts: a text, or a list of them; none of them empty."""
        value = self.value.get(name)
        if value is None:
            return None
        values = [value] if isinstance(value, str) else value
        if not isinstance(values, list) or not all(isinstance(text, str) and text for text in values):
            raise self.wrong(name, "must be a text or a list of texts that are not empty.")
        return values

    def refuse(self, name: str, why: str, *harmless: Any, code: str = "") -> None:
        """Raise if the field is there, and is none of the harmless values."""
        value = self.value.get(name)
        if value not in (None, [], {}, *harmless):
            raise self.wrong(name, why, code)

    def _of(self, name: str, kind: Any, called: str) -> Any:
        value = self.value.get(name)
        if value is not None and not isinstance(value, kind):
            raise self.wrong(name, f"must be {called}, not {_kind(value)}.")
        return value

    def _needed(self, name: str, value: Any) -> Any:
        if value is None:
            raise self.wrong(name, "is missing.")
        return value


def _kind(value: Any) -> str:
    names = {str: "text", bool: "true or false", int: "a number", float: "a number", list: "a list", dict: "an object"}
    return names.get(type(value), "null")


def _shown(value: Any) -> str:
    return f"{json.dumps(value)[:40]}"


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


@dataclass(frozen=True)
class ClientRequest:
    """A request."""

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of `TurnSampler.sample` that the request names."""
    model: str = "policy"
    """Name that the client gives the model."""
    is_streamed: bool = False
    wants: frozenset[str] = frozenset()
    """Further parts of the answer: usage, logprobs, thinking."""
    kept: Sequence[Message] | None = None
    """Messages that a later request may refer to; None: it may not."""
    ignored: Sequence[str] = ()
    """Options that have no effect here."""


def sampling_options(body: Fields, *, length: Sequence[str], stop: str) -> dict[str, Any]:
    """Options of sampling. `length`, `stop`: the protocol's names for them; of several for one thing, the first that is
    there counts."""
    lengths = [body.whole(name, 1) for name in length]
    top_k = body.whole("top_k", -1)
    found = {
        "temperature": body.number("temperature", 0),
        "top_p": body.number("top_p", 1e-6, 1),
        "top_k": max(top_k, 0) if top_k is not None else None,
        "min_p": body.number("min_p", 0, 1),
        "max_tokens": next((number for number in lengths if number is not None), None),
        "stop": body.texts(stop) or None,
        "structure": guided(body),
        "must_call": forced(body),
        "ignore_eos": body.flag("ignore_eos") or None,
        "one_call": takes_one_call(body) or None,
    }
    return {name: value for name, value in found.items() if value is not None}


def guided(body: Fields) -> dict[str, Any] | None:
    """Read a structure as vLLM's own endpoint takes it: {structured_outputs: {json | regex | choice | grammar: …}}, or
    guided_json, …"""
    outer = body.object("structured_outputs")
    for fields, prefix in ((outer, ""), (body, "guided_")):
        for name in GUIDED:
            if fields is not None and prefix + name in fields:
                return {name: fields.raw(prefix + name)}
    return None


def json_format(form: Fields | None) -> dict[str, Any] | None:
    """Convert {type: text | json_object | json_schema, schema} to the option `structure`. The schema may be a level
    deeper, as chat completions have it."""
    kind = form.text("type") if form is not None else None
    if form is None or kind in (None, "text"):
        return None
    if kind == "json_object":
        return {"structure": {"json": {"type": "object"}}}
    if kind != "json_schema":
        raise form.wrong("type", f"{kind} is not known: text, json_object or json_schema.")
    schema = (form.object("json_schema") or form).need_object("schema")
    return {"structure": {"json": schema.value}}


def function_tool(described: Fields) -> dict[str, Any]:
    """Convert {name, description, parameters} of any protocol to the tool that templates take."""
    parameters = described.object("parameters") or described.object("input_schema")
    function: dict[str, Any] = {"name": described.need_text("name")}
    if "description" in described:
        function["description"] = described.text("description")
    function["parameters"] = parameters.value if parameters is not None else {"type": "object", "properties": {}}
    return {"type": "function", "function": function}


def chosen(tools: Sequence[Mapping[str, Any]], body: Fields) -> Sequence[Mapping[str, Any]]:
    """The tools that a request leaves the policy to choose from: all of them, or none."""
    return () if _choice(body)[0] == "none" else tools


def forced(body: Fields) -> str | None:
    """The name of the tool that the answer has to call, or `ANY`; None: it may call none."""
    kind, choice = _choice(body)
    if kind in (None, "auto", "none"):
        return None
    if kind in ("required", "any"):
        return ANY
    named = choice.get("function", choice) if kind in ("function", "tool") else None
    name = named.get("name") if isinstance(named, Mapping) else None
    if not isinstance(name, str) or not name:
        raise body.wrong("tool_choice", 'is not known: "auto", "none", "required", or a function by its name.')
    return name


def takes_one_call(body: Fields) -> bool:
    """Return whether a client takes no more than one call in an answer."""
    choice = body.object("tool_choice") if isinstance(body.raw("tool_choice"), Mapping) else None
    is_one = choice is not None and choice.flag("disable_parallel_tool_use")
    return is_one or ("parallel_tool_calls" in body and not body.flag("parallel_tool_calls"))


def _choice(body: Fields) -> tuple[Any, Mapping[str, Any]]:
    """What a request says of the call: its kind in the protocol's word, and the whole."""
    choice = body.raw("tool_choice")
    return (choice.get("type"), choice) if isinstance(choice, Mapping) else (choice, {})


def arguments_of(call: Fields, name: str) -> Mapping[str, Any]:
    """Arguments of a call that comes back: JSON text or an object."""
    value = call.raw(name)
    if isinstance(value, str):
        if has_many(value.encode()):  # which escapes hide from the count of the body
            raise call.wrong(name, f"has more than {MOST_VALUES:,} values.")
        try:
            value = json.loads(value) if value.strip() else {}
        except (ValueError, RecursionError):
            raise call.wrong(name, "is no JSON.") from None
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise call.wrong(name, "must be a JSON object.")
    return value


def assistant(content: str, thinking: str | None = None, calls: Sequence[Mapping[str, Any]] = ()) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if thinking:
        message["reasoning_content"] = thinking
    if calls:
        message["tool_calls"] = list(calls)
    return message


def tool_results_named(messages: Sequence[dict[str, Any]]) -> list[Message]:
    """Messages with the tool's name beside each result: some templates write it."""
    names: dict[str, str] = {}
    for message in messages:
        for call in message.get("tool_calls", ()):
            names[call["id"]] = call["function"]["name"]
        if message["role"] == "tool" and message.get("tool_call_id") in names:
            message.setdefault("name", names[message["tool_call_id"]])
    return list(messages)


def content_text(holder: Fields, name: str, kinds: Sequence[str], *, between: str = "\n") -> str:
    """The text, or the joined parts of it of the given kinds. Raises for pictures and the like."""
    value = holder.raw(name)
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    return between.join(_text(part, kinds) for part in holder.objects(name))


def content(
    holder: Fields, name: str, kinds: Sequence[str], pictures: Mapping[str, PictureReader]
) -> str | list[dict[str, Any]]:
    """The text, or the joined parts of it; with pictures a list of parts. `pictures`: readers of those, by their
    kind."""
    if not isinstance(holder.raw(name), list):
        return content_text(holder, name, kinds)
    pieces = [
        pictures[kind](part) if (kind := part.need_text("type")) in pictures else _text(part, (*kinds, *pictures))
        for part in holder.objects(name)
    ]
    return in_order(pieces, "\n")


def _text(part: Fields, kinds: Sequence[str]) -> str:
    kind = part.need_text("type")
    if kind not in kinds:
        raise part.wrong("type", f"{kind} cannot be read here: the policy reads {', '.join(kinds)}.")
    return part.need_text("refusal" if kind == "refusal" else "text")


@dataclass(frozen=True)
class ServerSentEvent:
    """A server-sent event."""

    data: Mapping[str, Any] | str
    name: str = ""
    """Name of the event; empty: it has none, as in chat completions."""

    def encode(self) -> bytes:
        data = self.data if isinstance(self.data, str) else json.dumps(self.data)
        return (f"event: {self.name}\n" if self.name else "").encode() + f"data: {data}\n\n".encode()


def pieces(text: str) -> Iterator[str]:
    """Pieces of a text in order; none for an empty one."""
    size = -(-len(text) // NUM_PIECES)
    for start in range(0, len(text), max(1, size)):
        yield text[start : start + size]


@dataclass(frozen=True)
class ClientProtocol:
    """A protocol that the endpoint speaks."""

    request_of: Callable[[Fields, Mapping[str, Sequence[Message]]], ClientRequest]
    """Function that reads a request. Raises `BadRequest`."""
    answer: Callable[[ClientRequest, Turn, str], Mapping[str, Any]]
    """Function that writes a turn as a whole. The last argument: part of ids, the attempt's own."""
    events: Callable[[ClientRequest, Turn, str], Iterator[ServerSentEvent]]
    """Function that writes a turn as a stream."""
    error: Callable[[ClientFailure], Mapping[str, Any]] = as_openai
    error_event: str = ""
    """Name of an error in a stream that has begun."""
    waiting: bytes = COMMENT
    """Bytes that a stream sends while its turn is being sampled."""
    answer_id: Callable[[Turn, str], str] | None = None
    """Function for the id by which later requests may refer to an answer."""

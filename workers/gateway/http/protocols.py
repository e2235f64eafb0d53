"""The protocols that the endpoint speaks, by their paths."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.workers.gateway.formats.conversation import Message
from penstock.workers.gateway.http import chat, messages, responses
from penstock.workers.gateway.http.errors import Failure, as_anthropic, as_openai
from penstock.workers.gateway.http.exchange import COMMENT, Asked, Event
from penstock.workers.gateway.http.fields import Fields
from penstock.workers.trajectory import Turn


@dataclass(frozen=True)
class Protocol:
    asked: Callable[[Fields, Mapping[str, Sequence[Message]]], Asked]
    """Function that reads a request. Raises `BadRequest`."""
    answer: Callable[[Asked, Turn, str], Mapping[str, Any]]
    """Function that writes a turn as a whole. The last argument: part of ids, the attempt's own."""
    events: Callable[[Asked, Turn, str], Iterator[Event]]
    """Function that writes a turn as a stream."""
    error: Callable[[Failure], Mapping[str, Any]] = as_openai
    error_event: str = ""
    """Name of an error in a stream that has begun."""
    waiting: bytes = COMMENT
    """Bytes that a stream sends while its turn is being sampled."""
    answer_id: Callable[[Turn, str], str] | None = None
    """Function for the id by which later requests may refer to an answer."""


ANTHROPIC = Protocol(messages.asked, messages.answer, messages.events, as_anthropic, "error", messages.PING)
PROTOCOLS = {
    "/v1/chat/completions": Protocol(chat.asked, chat.answer, chat.events),
    "/v1/responses": Protocol(
        responses.asked, responses.answer, responses.events, error_event="error", answer_id=responses.answer_id
    ),
    "/v1/messages": ANTHROPIC,
}


def error_shape(path: str, headers: Mapping[str, str]) -> Callable[[Failure], Mapping[str, Any]]:
    """The form of errors in answers to any path."""
    is_anthropic = path.startswith("/v1/messages") or "anthropic-version" in headers
    return as_anthropic if is_anthropic else as_openai


def models(created: int) -> dict[str, Any]:
    """The list of models in the form of both protocols. There is one model, and any name in a request means it."""
    model = {
        "id": "policy", "object": "model", "created": created, "owned_by": "penstock",
        "type": "model", "display_name": "policy", "created_at": "1970-01-01T00:00:00Z", "lifecycle": "active",
    }  # fmt: skip
    return {"object": "list", "data": [model], "has_more": False, "first_id": "policy", "last_id": "policy"}

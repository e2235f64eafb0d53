"""OpenAI's responses: a request to messages, a turn to an answer or its stream. Pure.

An answer has up to three kinds of items: thinking, text, and calls. They come back one by one, and make one message
again. `previous_response_id` continues the conversation of the attempt's earlier response, without its instructions, as
the protocol has it; nothing is kept of a request with `store: false`, or after the attempt.
"""

import itertools
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from penstock.workers.agents.gateway.client_requests import (
    ClientProtocol,
    ClientRequest,
    Fields,
    ServerSentEvent,
    arguments_of,
    assistant,
    chosen,
    content,
    content_text,
    function_tool,
    json_format,
    of_responses,
    pieces,
    sampling_options,
    tool_results_named,
)
from penstock.workers.agents.gateway.conversation import Message, tool_call
from penstock.workers.agents.gateway.request_options import RESPONSES as RESPONSES_OPTIONS
from penstock.workers.agents.trajectory import Turn

ROLES = {"system": "system", "developer": "system", "user": "user"}
TEXTS = ("input_text", "output_text", "text")
PICTURES = {"input_image": of_responses}


def request_of(body: Fields, earlier: Mapping[str, Sequence[Message]]) -> ClientRequest:
    """Read a request. `earlier`: the conversations of the attempt's responses, by their ids."""
    ignored = RESPONSES_OPTIONS.checked(body)
    options = sampling_options(body, length=("max_output_tokens",), stop="stop")
    text = body.object("text")
    options |= json_format(text.object("format") if text is not None else None) or {}
    said = [*_earlier(body, earlier), *_input(body)]
    instructions = body.text("instructions")
    system = [{"role": "system", "content": instructions}] if instructions else []
    is_kept = body.raw("store") is not False
    messages = tool_results_named([dict(message) for message in [*system, *said]])
    return ClientRequest(
        messages, chosen([_tool(tool) for tool in body.objects("tools")], body), options,
        body.text("model") or "policy", body.flag("stream"), kept=messages[len(system) :] if is_kept else None,
        ignored=ignored,
    )  # fmt: skip


def answer_id(turn: Turn, tag: str) -> str:
    return f"resp_{tag}_{turn.id}"


def answer(asked: ClientRequest, turn: Turn, tag: str) -> dict[str, Any]:
    is_cut = turn.finish == "length"
    return _about(asked, turn, tag) | {
        "status": "incomplete" if is_cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "output": _items(turn, tag),
        "usage": _usage(turn),
    }


def events(asked: ClientRequest, turn: Turn, tag: str) -> Iterator[ServerSentEvent]:
    numbers = itertools.count()
    for kind, data in _events(asked, turn, tag):
        yield ServerSentEvent({"type": kind, "sequence_number": next(numbers), **data}, kind)


def _events(asked: ClientRequest, turn: Turn, tag: str) -> Iterator[tuple[str, dict[str, Any]]]:
    nothing: dict[str, Any] = {"status": "in_progress", "incomplete_details": None, "output": [], "usage": None}
    begun = _about(asked, turn, tag) | nothing
    yield "response.created", {"response": begun}
    yield "response.in_progress", {"response": begun}
    for index, item in enumerate(_items(turn, tag)):
        yield from _streamed(index, item)
    done = answer(asked, turn, tag)
    yield f"response.{done['status']}", {"response": done}


def _streamed(index: int, item: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    empty: dict[str, Any] = {"arguments": ""} if item["type"] == "function_call" else {"content": []}
    yield "response.output_item.added", {"output_index": index, "item": {**item, "status": "in_progress", **empty}}
    at = {"item_id": item["id"], "output_index": index}
    if item["type"] == "function_call":
        for piece in pieces(item["arguments"]):
            yield "response.function_call_arguments.delta", {**at, "delta": piece}
        named = {"name": item["name"], "arguments": item["arguments"]}
        yield "response.function_call_arguments.done", {**at, **named}
    else:
        yield from _part(at | {"content_index": 0}, item["content"][0])
    yield "response.output_item.done", {"output_index": index, "item": item}


def _part(at: Mapping[str, Any], part: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    kind, text = part["type"], part["text"]
    more: dict[str, Any] = {"logprobs": []} if kind == "output_text" else {}
    yield "response.content_part.added", {**at, "part": {**part, "text": ""}}
    for piece in pieces(text):
        yield f"response.{kind}.delta", {**at, "delta": piece, **more}
    yield f"response.{kind}.done", {**at, "text": text, **more}
    yield "response.content_part.done", {**at, "part": part}


def _earlier(body: Fields, earlier: Mapping[str, Sequence[Message]]) -> Sequence[Message]:
    name = body.text("previous_response_id")
    if name is None:
        return ()
    if name not in earlier:
        raise body.wrong("previous_response_id", "no response of this attempt that was stored has this id.")
    return earlier[name]


def _input(body: Fields) -> list[dict[str, Any]]:
    if isinstance(body.raw("input"), str):
        return [{"role": "user", "content": body.text("input")}]
    messages: list[dict[str, Any]] = []
    assistant_message = _AssistantMessage()
    for item in body.need_objects("input"):
        kind = item.text("type") or "message"
        if (kind == "message" and item.need_text("role") == "assistant") or kind in ("reasoning", "function_call"):
            messages += assistant_message.take(kind, item)
        else:
            messages += [*assistant_message.end(), _other_message(kind, item)]
    return [*messages, *assistant_message.end()]


class _AssistantMessage:
    """The assistant's items since the last message of another role."""

    def __init__(self) -> None:
        self._thinking: str | None = None
        self._text: str | None = None
        self._calls: list[dict[str, Any]] = []

    def take(self, kind: str, item: Fields) -> list[dict[str, Any]]:
        """Take an item; return the message that is complete before it, if this item begins another."""
        begins = (kind == "message" and (self._text is not None or self._calls)) or (
            kind == "reasoning" and (self._thinking is not None or self._text is not None or self._calls)
        )
        before = self.end() if begins else []
        if kind == "message":
            self._text = content_text(item, "content", (*TEXTS, "refusal"), between="")
        elif kind == "reasoning":
            self._thinking = content_text(item, "content", ("reasoning_text", "text"), between="")
        else:
            arguments = arguments_of(item, "arguments")
            self._calls.append(tool_call(item.need_text("call_id"), item.need_text("name"), arguments))
        return before

    def end(self) -> list[dict[str, Any]]:
        if self._thinking is None and self._text is None and not self._calls:
            return []
        message = assistant(self._text or "", self._thinking, self._calls)
        self._thinking, self._text, self._calls = None, None, []
        return [message]


def _other_message(kind: str, item: Fields) -> dict[str, Any]:
    if kind == "message":
        role = item.need_text("role")
        if role not in ROLES:
            raise item.wrong("role", f"{role} is not known: system, developer, user or assistant.")
        return {"role": ROLES[role], "content": content(item, "content", TEXTS, PICTURES if role == "user" else {})}
    if kind == "function_call_output":
        return {
            "role": "tool", "content": content(item, "output", TEXTS, PICTURES),
            "tool_call_id": item.need_text("call_id"),
        }  # fmt: skip
    raise item.wrong("type", f"{kind} cannot be read: message, reasoning, function_call or function_call_output.")


def _tool(tool: Fields) -> dict[str, Any]:
    if tool.need_text("type") != "function":
        raise tool.wrong("type", f"{tool.text('type')} cannot be offered: functions are what the policy can call.")
    return function_tool(tool)


def _items(turn: Turn, tag: str) -> list[dict[str, Any]]:
    thinking, said = turn.message.get("reasoning_content"), str(turn.message.get("content") or "")
    name = f"{tag}_{turn.id}"
    status = "incomplete" if turn.finish == "length" else "completed"
    items: list[dict[str, Any]] = []
    if thinking:
        text = [{"type": "reasoning_text", "text": thinking}]
        items.append({"id": f"rs_{name}", "type": "reasoning", "summary": [], "content": text, "status": "completed"})
    if said or not turn.calls:  # who drops what was thought sends back that something was said
        part = {"type": "output_text", "text": said, "annotations": [], "logprobs": []}
        message = {"id": f"msg_{name}", "type": "message", "role": "assistant", "content": [part], "status": status}
        items.append(message)
    for index, call in enumerate(turn.calls):
        items.append({
            "id": f"fc_{name}_{index}", "type": "function_call", "call_id": call.id, "name": call.name,
            "arguments": json.dumps(dict(call.arguments)), "status": "completed",
        })  # fmt: skip
    return items


def _about(asked: ClientRequest, turn: Turn, tag: str) -> dict[str, Any]:
    tools = [{"type": "function", "strict": False, **tool["function"]} for tool in asked.tools]
    return {
        "id": answer_id(turn, tag), "object": "response", "created_at": int(time.time()), "model": asked.model,
        "error": None, "instructions": None, "metadata": {}, "parallel_tool_calls": True, "tool_choice": "auto",
        "tools": tools, "temperature": turn.sampling.get("temperature"), "top_p": turn.sampling.get("top_p"),
        "text": {"format": {"type": "text"}}, "truncation": "disabled",
    }  # fmt: skip


def _usage(turn: Turn) -> dict[str, Any]:
    read, sampled = len(turn.prompt_ids), len(turn.output_ids)
    return {
        "input_tokens": read, "output_tokens": sampled, "total_tokens": read + sampled,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens_details": {"reasoning_tokens": 0},
    }  # fmt: skip


RESPONSES = ClientProtocol(request_of, answer, events, error_event="error", answer_id=answer_id)

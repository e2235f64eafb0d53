"""OpenAI's chat completions: a request to messages, a turn to an answer or its stream. Pure.

A message's thinking is `reasoning_content`, in and out. `logprobs` are those of the sampled tokens, by their number in
the vocabulary ("token_id:1234"), because a token may end inside a character.
"""

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
    of_chat,
    pieces,
    sampling_options,
    tool_results_named,
)
from penstock.workers.agents.gateway.conversation import Message, tool_call
from penstock.workers.agents.gateway.request_options import CHAT as CHAT_OPTIONS
from penstock.workers.agents.gateway.request_options import CONTINUED
from penstock.workers.agents.trajectory import Turn

ROLES = {"system": "system", "developer": "system", "user": "user"}
PICTURES = {"image_url": of_chat}


def request_of(body: Fields, earlier: Mapping[str, Sequence[Message]]) -> ClientRequest:
    """Read a request. `earlier`: not used, since each request has all messages."""
    ignored = CHAT_OPTIONS.checked(body)
    options = sampling_options(body, length=("max_completion_tokens", "max_tokens"), stop="stop")
    options |= json_format(body.object("response_format")) or {}
    streaming = body.object("stream_options")
    wants = {"logprobs"} if body.flag("logprobs") else set()
    if streaming is not None and streaming.flag("include_usage"):
        wants.add("usage")
    return ClientRequest(
        tool_results_named([_message(message) for message in body.need_objects("messages")]),
        chosen([_tool(tool) for tool in body.objects("tools")], body), options, body.text("model") or "policy",
        body.flag("stream"), frozenset(wants), ignored=ignored,
    )  # fmt: skip


def answer(asked: ClientRequest, turn: Turn, tag: str) -> dict[str, Any]:
    choice = {
        "index": 0, "message": _said(turn), "finish_reason": _finish(turn),
        "logprobs": _logprobs(turn) if "logprobs" in asked.wants else None,
    }  # fmt: skip
    return _about(asked, turn, tag, "chat.completion") | {"choices": [choice], "usage": _usage(turn)}


def events(asked: ClientRequest, turn: Turn, tag: str) -> Iterator[ServerSentEvent]:
    head = _about(asked, turn, tag, "chat.completion.chunk")
    for delta in _deltas(turn):
        yield ServerSentEvent(head | {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]})
    last: dict[str, Any] = {"index": 0, "delta": {}, "finish_reason": _finish(turn)}
    if "logprobs" in asked.wants:
        last["logprobs"] = _logprobs(turn)
    yield ServerSentEvent(head | {"choices": [last]})
    if "usage" in asked.wants:
        yield ServerSentEvent(head | {"choices": [], "usage": _usage(turn)})
    yield ServerSentEvent("[DONE]")


def _message(message: Fields) -> dict[str, Any]:
    role = message.need_text("role")
    if role in ROLES:
        pictures = PICTURES if role == "user" else {}
        return {"role": ROLES[role], "content": content(message, "content", ("text",), pictures)}
    if role == "assistant":
        message.refuse("prefix", CONTINUED, False)
        thinking = message.text("reasoning_content") or message.text("reasoning")
        calls = [_call(call) for call in message.objects("tool_calls")]
        said = content_text(message, "content", ("text", "refusal"), between="")
        return assistant(said, thinking, calls)
    if role == "tool":
        return {
            "role": "tool", "content": content(message, "content", ("text",), PICTURES),
            "tool_call_id": message.need_text("tool_call_id"),
        }  # fmt: skip
    raise message.wrong("role", f"{role} is not known: system, developer, user, assistant or tool.")


def _call(call: Fields) -> dict[str, Any]:
    function = call.need_object("function")
    return tool_call(call.need_text("id"), function.need_text("name"), arguments_of(function, "arguments"))


def _tool(tool: Fields) -> dict[str, Any]:
    if tool.need_text("type") != "function":
        raise tool.wrong("type", f"{tool.text('type')} cannot be offered: functions are what the policy can call.")
    return function_tool(tool.need_object("function"))


def _said(turn: Turn) -> dict[str, Any]:
    content = str(turn.message.get("content") or "")
    said: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    if turn.message.get("reasoning_content"):
        said["reasoning_content"] = turn.message["reasoning_content"]
    if turn.calls:
        said["content"] = content or None
        said["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": _arguments(call.arguments)},
            }
            for call in turn.calls
        ]
    return said


def _deltas(turn: Turn) -> Iterator[dict[str, Any]]:
    yield {"role": "assistant", "content": ""}
    for piece in pieces(str(turn.message.get("reasoning_content") or "")):
        yield {"reasoning_content": piece}
    for piece in pieces(str(turn.message.get("content") or "")):
        yield {"content": piece}
    for index, call in enumerate(turn.calls):
        function = {"name": call.name, "arguments": ""}
        yield {"tool_calls": [{"index": index, "id": call.id, "type": "function", "function": function}]}
        for piece in pieces(_arguments(call.arguments)):
            yield {"tool_calls": [{"index": index, "function": {"arguments": piece}}]}


def _about(asked: ClientRequest, turn: Turn, tag: str, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{tag}-{turn.id}", "object": kind, "created": int(time.time()), "model": asked.model}


def _arguments(arguments: Mapping[str, Any]) -> str:
    return json.dumps(dict(arguments))


def _finish(turn: Turn) -> str:
    if turn.finish == "length":
        return "length"
    return "tool_calls" if turn.calls else "stop"


def _usage(turn: Turn) -> dict[str, Any]:
    read, sampled = len(turn.prompt_ids), len(turn.output_ids)
    return {"prompt_tokens": read, "completion_tokens": sampled, "total_tokens": read + sampled}


def _logprobs(turn: Turn) -> dict[str, Any]:
    tokens = zip(turn.output_ids, turn.logprobs, strict=True)
    return {
        "content": [
            {"token": f"token_id:{token}", "logprob": logprob, "bytes": None, "top_logprobs": []}
            for token, logprob in tokens
        ],
        "refusal": None,
    }  # fmt: skip


CHAT = ClientProtocol(request_of, answer, events)

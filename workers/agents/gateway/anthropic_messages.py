"""Anthropic's messages: a request to messages, a turn to an answer or its stream. Pure.

Thinking is given as blocks if the request has switched it on (`thinking`); clients that did not ask for it take the
first block for the answer. A message that comes back without its thinking still is the same history. Blocks of the
system prompt that a harness adds for the provider's billing are left out: they differ from request to request.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from penstock.workers.agents.gateway.client_errors import as_anthropic
from penstock.workers.agents.gateway.client_requests import (
    ClientProtocol,
    ClientRequest,
    Fields,
    ServerSentEvent,
    arguments_of,
    assistant,
    chosen,
    content,
    function_tool,
    in_order,
    json_format,
    of_messages,
    pieces,
    sampling_options,
    tool_results_named,
)
from penstock.workers.agents.gateway.conversation import Message, tool_call
from penstock.workers.agents.gateway.request_options import MESSAGES as MESSAGES_OPTIONS
from penstock.workers.agents.trajectory import Turn

PICTURES = {"image": of_messages}
ACCOUNTS = "x-anthropic-billing-header"
SIGNATURE = "policy"
"""Signature of thinking. Clients send back thinking only if it is signed; no client checks the signature."""
ERROR = "Error: "
"""Words before what a tool has returned that failed."""
PING = ServerSentEvent({"type": "ping"}, "ping").encode()


def request_of(body: Fields, earlier: Mapping[str, Sequence[Message]]) -> ClientRequest:
    """Read a request. `earlier`: not used, since each request has all messages."""
    ignored = MESSAGES_OPTIONS.checked(body)
    options = sampling_options(body, length=("max_tokens",), stop="stop_sequences")
    output = body.object("output_config")
    options |= json_format(output.object("format") if output is not None else body.object("output_format")) or {}
    said = [part for message in body.need_objects("messages") for part in _messages(message)]
    if said and said[-1]["role"] == "assistant":
        raise body.wrong("messages", "the last one is the assistant's: an answer cannot be begun for the policy.")
    thinking = body.object("thinking")
    thinks = thinking is not None and thinking.text("type") != "disabled"
    return ClientRequest(
        tool_results_named([*_system(body), *said]), chosen([_tool(tool) for tool in body.objects("tools")], body),
        options, body.text("model") or "policy", body.flag("stream"), frozenset({"thinking"} if thinks else ()),
        ignored=ignored,
    )  # fmt: skip


def answer(asked: ClientRequest, turn: Turn, tag: str) -> dict[str, Any]:
    return _about(asked, turn, tag) | {"content": _blocks(asked, turn), "usage": _usage(turn)} | _ending(turn)


def events(asked: ClientRequest, turn: Turn, tag: str) -> Iterator[ServerSentEvent]:
    start = _about(asked, turn, tag) | {"content": [], "stop_reason": None, "stop_sequence": None}
    yield _event("message_start", message=start | {"usage": _usage(turn) | {"output_tokens": 0}})
    for index, block in enumerate(_blocks(asked, turn)):
        yield from _streamed(index, block)
    yield _event("message_delta", delta=_ending(turn), usage={"output_tokens": len(turn.output_ids)})
    yield _event("message_stop")


def _system(body: Fields) -> Iterator[dict[str, Any]]:
    value = body.raw("system")
    texts = [value] if isinstance(value, str) else [_text(block) for block in body.objects("system")]
    text = "\n".join(text for text in texts if not text.startswith(ACCOUNTS))
    if text:
        yield {"role": "system", "content": text}


def _messages(message: Fields) -> Iterator[dict[str, Any]]:
    """Convert one of Anthropic's messages: results of tools are messages of their own here."""
    role = message.need_text("role")
    if role not in ("user", "assistant", "system"):
        raise message.wrong("role", f"{role} is not known: user or assistant.")
    if "content" not in message:
        raise message.wrong("content", "is missing.")
    if isinstance(message.raw("content"), str):
        yield {"role": role, "content": message.text("content")}
        return
    blocks = message.objects("content")
    yield from [_assistant(blocks)] if role == "assistant" else _user(role, blocks)


def _assistant(blocks: Sequence[Fields]) -> dict[str, Any]:
    said, thinking, calls = "", "", []
    for block in blocks:
        kind = block.need_text("type")
        if kind == "thinking":
            thinking += block.text("thinking") or ""
        elif kind == "tool_use":
            calls.append(tool_call(block.need_text("id"), block.need_text("name"), arguments_of(block, "input")))
        elif kind != "redacted_thinking":
            said += _text(block)
    return assistant(said, thinking, calls)


def _user(role: str, blocks: Sequence[Fields]) -> Iterator[dict[str, Any]]:
    pieces: list[str | bytes] = []
    for block in blocks:
        if block.need_text("type") != "tool_result":
            is_picture = block.text("type") in PICTURES and role == "user"
            pieces.append(of_messages(block) if is_picture else _text(block))
            continue
        if pieces:
            yield {"role": role, "content": in_order(pieces, "\n")}
            pieces = []
        yield {
            "role": "tool", "content": _result(block),
            "tool_call_id": block.need_text("tool_use_id"),
        }  # fmt: skip
    if pieces:
        yield {"role": role, "content": in_order(pieces, "\n")}


def _result(block: Fields) -> str | list[dict[str, Any]]:
    """What a tool has returned. Templates have no mark for an error: it is said in words."""
    said = content(block, "content", ("text",), PICTURES)
    if not block.flag("is_error"):
        return said
    return ERROR + said if isinstance(said, str) else [{"type": "text", "text": ERROR}, *said]


def _text(block: Fields) -> str:
    if block.need_text("type") != "text":
        raise block.wrong("type", f"{block.text('type')} cannot be read here: the policy reads text, and pictures.")
    return block.need_text("text")


def _tool(tool: Fields) -> dict[str, Any]:
    if (tool.text("type") or "custom") != "custom":
        raise tool.wrong("type", f"{tool.text('type')} cannot be offered: describe a tool by its input_schema.")
    return function_tool(tool)


def _blocks(asked: ClientRequest, turn: Turn) -> list[dict[str, Any]]:
    thinking, said = turn.message.get("reasoning_content"), turn.message.get("content")
    blocks: list[dict[str, Any]] = []
    if thinking and "thinking" in asked.wants:
        blocks.append({"type": "thinking", "thinking": thinking, "signature": SIGNATURE})
    if said or not (blocks or turn.calls):
        blocks.append({"type": "text", "text": said})
    calls = (
        {"type": "tool_use", "id": call.id, "name": call.name, "input": dict(call.arguments)} for call in turn.calls
    )
    return [*blocks, *calls]


def _streamed(index: int, block: Mapping[str, Any]) -> Iterator[ServerSentEvent]:
    kind = block["type"]
    if kind == "text":
        start: dict[str, Any] = {"text": ""}
        deltas = [{"type": "text_delta", "text": piece} for piece in pieces(block["text"])]
    elif kind == "thinking":
        start = {"thinking": "", "signature": ""}
        deltas = [{"type": "thinking_delta", "thinking": piece} for piece in pieces(block["thinking"])]
        deltas.append({"type": "signature_delta", "signature": block["signature"]})
    else:
        start = {"id": block["id"], "name": block["name"], "input": {}}
        arguments = json.dumps(block["input"])
        deltas = [{"type": "input_json_delta", "partial_json": piece} for piece in pieces(arguments)]
    yield _event("content_block_start", index=index, content_block={"type": kind} | start)
    for delta in deltas:
        yield _event("content_block_delta", index=index, delta=delta)
    yield _event("content_block_stop", index=index)


def _event(kind: str, **data: Any) -> ServerSentEvent:
    return ServerSentEvent({"type": kind, **data}, kind)


def _about(asked: ClientRequest, turn: Turn, tag: str) -> dict[str, Any]:
    return {"id": f"msg_{tag}_{turn.id}", "type": "message", "role": "assistant", "model": asked.model}


def _ending(turn: Turn) -> dict[str, Any]:
    if turn.finish == "length":
        reason = "max_tokens"
    elif turn.calls:
        reason = "tool_use"
    else:
        reason = "stop_sequence" if turn.stopped_by else "end_turn"
    return {"stop_reason": reason, "stop_sequence": turn.stopped_by if reason == "stop_sequence" else None}


def _usage(turn: Turn) -> dict[str, Any]:
    return {
        "input_tokens": len(turn.prompt_ids), "output_tokens": len(turn.output_ids),
        "cache_creation_input_tokens": 0, "cache_read_input_tokens": 0,
    }  # fmt: skip


MESSAGES = ClientProtocol(request_of, answer, events, as_anthropic, "error", PING)

"""The protocols of agents' clients: each reads a request as messages, and writes a turn as an answer or its stream.
Pure.

OpenAI's chat completions. A message's thinking is `reasoning_content`, in and out. `logprobs` are those of the sampled
tokens, by their number in the vocabulary ("token_id:1234"), because a token may end inside a character.

OpenAI's responses. An answer has up to three kinds of items: thinking, text, and calls. They come back one by one, and
make one message again. `previous_response_id` continues the conversation of the attempt's earlier response, without its
instructions, as the protocol has it; nothing is kept of a request with `store: false`, or after the attempt.

Anthropic's messages. Thinking is given as blocks if the request has switched it on (`thinking`); clients that did not
ask for it take the first block for the answer. A message that comes back without its thinking is still the same
history. Blocks of the system prompt that a harness adds for the provider's billing are left out: they differ from
request to request.

Each has a table of options: those that are honoured, those that are harmless, as the answer is the same without them,
and those that are refused, as it would not be. An option that a table does not list, or lists without effect, is
returned, so that it is counted and reported once. Tests compare the tables with what the packages `openai`, `anthropic`
and vLLM let their clients send.
"""

import itertools
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
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
    content_text,
    function_tool,
    in_order,
    json_format,
    of_chat,
    of_messages,
    of_responses,
    pieces,
    sampling_options,
    tool_results_named,
)
from penstock.workers.agents.gateway.conversation import Message, tool_call
from penstock.workers.agents.trajectory import Turn

TRAINED = "is not supported: it would change the distribution, and the trainer knows of the run's alone."
NOT_SUPPORTED = "is not supported."
CONTINUED = "an answer cannot be begun for the policy: let a message of the user be the last."
TEMPLATE = "is the run's to choose: set model.chat_template_kwargs."
TEXT = "an answer is given without special tokens and stop strings."
NOT_CUT = "the conversation is not cut: send a shorter one."
PENALTIES = "penalties are not supported"
INPUT_ALONE = "is not supported: send the messages as `input`."
SAMPLED_ALONE = "only the log-probabilities of sampled tokens are known (logprobs)."
_SAMPLING = frozenset({
    "model", "temperature", "top_p", "top_k", "min_p", "ignore_eos", "tools", "tool_choice", "stream",
    "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar",
})  # fmt: skip
_HARMLESS = frozenset({
    # accounts, caches and queues
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_options",
    "prompt_cache_retention", "cache_salt", "priority", "request_id", "session_id", "stream_interval",
    "kv_transfer_params", "ec_transfer_params", "moderation",
    # the attempt has a seed of its own
    "seed",
})  # fmt: skip
ROLES = {"system": "system", "developer": "system", "user": "user"}
CHAT_PICTURES = {"image_url": of_chat}
TEXTS = ("input_text", "output_text", "text")
RESPONSE_PICTURES = {"input_image": of_responses}
MESSAGE_PICTURES = {"image": of_messages}
ACCOUNTS = "x-anthropic-billing-header"
SIGNATURE = "policy"
"""Signature of thinking. Clients send back thinking only if it is signed; no client checks the signature."""
ERROR = "Error: "
"""Words before what a tool has returned that failed."""
PING = ServerSentEvent({"type": "ping"}, "ping").encode()


@dataclass(frozen=True)
class RefusedOption:
    """An option that is refused, unless it has a value that changes nothing."""

    why: str
    harmless: tuple[Any, ...] = ()
    code: str = ""
    """Code of the error, by which Anthropic's client knows what to do without."""


def _alike(names: str, why: str, *harmless: Any) -> dict[str, RefusedOption]:
    """Options that are refused for one reason, their names separated by blanks."""
    return dict.fromkeys(names.split(), RefusedOption(why, harmless))


@dataclass(frozen=True)
class OptionTable:
    """The table of one protocol."""

    honoured: frozenset[str]
    harmless: frozenset[str]
    refused: Mapping[str, RefusedOption]
    without_effect: frozenset[str] = frozenset()
    """Options that clients send by themselves and that mean nothing to the policy, reported like unknown ones."""

    def checked(self, body: Fields) -> tuple[str, ...]:
        """Names of options that have no effect. Raises `BadRequest` for one that is refused."""
        for name, refused in self.refused.items():
            body.refuse(name, refused.why, *refused.harmless, code=refused.code)
        known = self.honoured | self.harmless | self.refused.keys()
        without_effect = (name for name in body.value if name in body and name not in known)
        return (*without_effect, *_nested_without_effect(body))


_REFUSED = {
    **_alike("frequency_penalty presence_penalty", f"{PENALTIES}: they would change what the policy is trained on.", 0),
    **_alike("repetition_penalty length_penalty", f"{PENALTIES}.", 1),
    **_alike("logit_bias repetition_detection mm_payload vllm_xargs", NOT_SUPPORTED),
    **_alike("media_io_kwargs mm_processor_kwargs", NOT_SUPPORTED),
    **_alike("bad_words allowed_token_ids", TRAINED),
    "min_tokens": RefusedOption(TRAINED, (0,)),
    **_alike("watermarking use_beam_search", TRAINED, False),
    "thinking_token_budget": RefusedOption("thinking is bounded by max_tokens alone."),
    "stop_token_ids": RefusedOption("is not supported: name what ends an answer as text."),
    "include_stop_str_in_output": RefusedOption(TEXT, (False,)),
    **_alike("skip_special_tokens spaces_between_special_tokens", TEXT, True),
    **_alike("truncate_prompt_tokens truncation_side", NOT_CUT),
    **_alike("prompt_logprobs logprob_token_ids", SAMPLED_ALONE),
    "add_generation_prompt": RefusedOption(CONTINUED, (True,)),
    "continue_final_message": RefusedOption(CONTINUED, (False,)),
    "add_special_tokens": RefusedOption(TEMPLATE, (False,)),
    **_alike("chat_template chat_template_kwargs", TEMPLATE),
    "documents": RefusedOption("is not supported: write them into a message."),
    "echo": RefusedOption(NOT_SUPPORTED, (False,)),
    "include_reasoning": RefusedOption("an answer is given with its thinking.", (True,)),
    "return_mm_kwargs": RefusedOption(NOT_SUPPORTED, (False,)),
}
CHAT_OPTIONS = OptionTable(
    _SAMPLING | {
        "messages", "max_tokens", "max_completion_tokens", "stop", "response_format", "parallel_tool_calls", "logprobs",
        "stream_options",
    },
    _HARMLESS | {"return_tokens_as_token_ids"},
    _REFUSED | {
        "n": RefusedOption("there is one answer to a request: send several, side by side.", (1,)),
        "best_of": RefusedOption("there is one answer to a request.", (1,)),
        "modalities": RefusedOption("the policy answers in text alone.", (["text"],)),
        "functions": RefusedOption("is not supported: describe them as `tools`."),
        "function_call": RefusedOption("is not supported: say `tool_choice`.", ("none", "auto")),
        "top_logprobs": RefusedOption(SAMPLED_ALONE, (0,)),
        **_alike("audio prediction web_search_options", NOT_SUPPORTED),
        **_alike("return_token_ids return_token_offsets", "tokens are told by logprobs alone.", False),
        "return_prompt_text": RefusedOption(NOT_SUPPORTED, (False,)),
        "routed_experts_prompt_start": RefusedOption(NOT_SUPPORTED, (0,)),
    },
    frozenset({"reasoning_effort", "verbosity"}),
)  # fmt: skip
RESPONSES_OPTIONS = OptionTable(
    _SAMPLING | {
        "input", "instructions", "max_output_tokens", "stop", "text", "parallel_tool_calls", "previous_response_id",
        "store",
    },
    (_HARMLESS - {"store"}) | {"stream_options", "max_tool_calls"},
    _REFUSED | {
        **_alike("conversation prompt context_management previous_input_messages", INPUT_ALONE),
        "background": RefusedOption(INPUT_ALONE, (False,)),
        "truncation": RefusedOption(NOT_CUT, ("disabled",)),
        "top_logprobs": RefusedOption("are not given here.", (0,)),
        "enable_response_messages": RefusedOption(NOT_SUPPORTED, (False,)),
        "image": RefusedOption("the policy answers in text alone."),
    },
    frozenset({"reasoning", "include", "access_programs"}),
)  # fmt: skip
MESSAGES_OPTIONS = OptionTable(
    _SAMPLING | {
        "messages", "max_tokens", "stop_sequences", "system", "thinking", "output_config", "output_format",
    },
    _HARMLESS | {"cache_control", "workspace_id", "user_profile_id", "inference_geo", "speed", "billing_policy"},
    _REFUSED | {
        **_alike("container mcp_servers context_management compaction", NOT_SUPPORTED),
        "thread": RefusedOption("is not supported: send all messages each time.", code="thread_unsupported_request"),
    },
    frozenset({"betas", "diagnostics", "fallbacks", "fallback_credit_token"}),
)  # fmt: skip


def _nested_without_effect(body: Fields) -> Iterator[str]:
    """Names of options inside of others that clients send by themselves, and that mean nothing to the policy."""
    for holder, name in (("thinking", "budget_tokens"), ("output_config", "effort"), ("text", "verbosity")):
        inner = body.raw(holder)
        if isinstance(inner, Mapping) and inner.get(name) is not None:
            yield f"{holder}.{name}"
    if any(tool.get("strict") or _function(tool).get("strict") for tool in _mappings(body.raw("tools"))):
        yield "tools.strict"


def _function(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    inner = tool.get("function")
    return inner if isinstance(inner, Mapping) else {}


def _mappings(value: Any) -> Iterator[Mapping[str, Any]]:
    return (one for one in value if isinstance(one, Mapping)) if isinstance(value, list) else iter(())


def _request(
    body: Fields,
    messages: Sequence[dict[str, Any]],
    tool_of: Callable[[Fields], dict[str, Any]],
    options: Mapping[str, Any],
    **more: Any,
) -> ClientRequest:
    """A request with what all protocols call alike. `tool_of`: reads a tool."""
    return ClientRequest(
        tool_results_named(messages), chosen([tool_of(tool) for tool in body.objects("tools")], body), options,
        body.text("model") or "policy", body.flag("stream"), **more,
    )  # fmt: skip


def _check_is_function(tool: Fields) -> None:
    if tool.need_text("type") != "function":
        raise tool.wrong("type", f"{tool.text('type')} cannot be offered: functions are what the policy can call.")


def chat_request(body: Fields, earlier: Mapping[str, Sequence[Message]]) -> ClientRequest:
    """Read a request. `earlier`: not used, since each request has all messages."""
    ignored = CHAT_OPTIONS.checked(body)
    options = sampling_options(body, length=("max_completion_tokens", "max_tokens"), stop="stop")
    options |= json_format(body.object("response_format")) or {}
    streaming = body.object("stream_options")
    wants = {"logprobs"} if body.flag("logprobs") else set()
    if streaming is not None and streaming.flag("include_usage"):
        wants.add("usage")
    messages = [_chat_message(message) for message in body.need_objects("messages")]
    return _request(body, messages, _chat_tool, options, wants=frozenset(wants), ignored=ignored)


def chat_answer(asked: ClientRequest, turn: Turn, tag: str) -> dict[str, Any]:
    choice = {
        "index": 0, "message": _chat_answer_message(turn), "finish_reason": _chat_finish(turn),
        "logprobs": _logprobs(turn) if "logprobs" in asked.wants else None,
    }  # fmt: skip
    return _chat_head(asked, turn, tag, "chat.completion") | {"choices": [choice], "usage": _chat_usage(turn)}


def chat_events(asked: ClientRequest, turn: Turn, tag: str) -> Iterator[ServerSentEvent]:
    head = _chat_head(asked, turn, tag, "chat.completion.chunk")
    for delta in _deltas(turn):
        yield ServerSentEvent(head | {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]})
    last: dict[str, Any] = {"index": 0, "delta": {}, "finish_reason": _chat_finish(turn)}
    if "logprobs" in asked.wants:
        last["logprobs"] = _logprobs(turn)
    yield ServerSentEvent(head | {"choices": [last]})
    if "usage" in asked.wants:
        yield ServerSentEvent(head | {"choices": [], "usage": _chat_usage(turn)})
    yield ServerSentEvent("[DONE]")


def _chat_message(message: Fields) -> dict[str, Any]:
    role = message.need_text("role")
    if role in ROLES:
        pictures = CHAT_PICTURES if role == "user" else {}
        return {"role": ROLES[role], "content": content(message, "content", ("text",), pictures)}
    if role == "assistant":
        message.refuse("prefix", CONTINUED, False)
        thinking = message.text("reasoning_content") or message.text("reasoning")
        calls = [_call(call) for call in message.objects("tool_calls")]
        said = content_text(message, "content", ("text", "refusal"), between="")
        return assistant(said, thinking, calls)
    if role == "tool":
        return {
            "role": "tool", "content": content(message, "content", ("text",), CHAT_PICTURES),
            "tool_call_id": message.need_text("tool_call_id"),
        }  # fmt: skip
    raise message.wrong("role", f"{role} is not known: system, developer, user, assistant or tool.")


def _call(call: Fields) -> dict[str, Any]:
    function = call.need_object("function")
    return tool_call(call.need_text("id"), function.need_text("name"), arguments_of(function, "arguments"))


def _chat_tool(tool: Fields) -> dict[str, Any]:
    _check_is_function(tool)
    return function_tool(tool.need_object("function"))


def _chat_answer_message(turn: Turn) -> dict[str, Any]:
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


def _chat_head(asked: ClientRequest, turn: Turn, tag: str, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{tag}-{turn.id}", "object": kind, "created": int(time.time()), "model": asked.model}


def _arguments(arguments: Mapping[str, Any]) -> str:
    return json.dumps(dict(arguments))


def _chat_finish(turn: Turn) -> str:
    if turn.finish == "length":
        return "length"
    return "tool_calls" if turn.calls else "stop"


def _chat_usage(turn: Turn) -> dict[str, Any]:
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


CHAT = ClientProtocol(chat_request, chat_answer, chat_events)


def responses_request(body: Fields, earlier: Mapping[str, Sequence[Message]]) -> ClientRequest:
    """Read a request. `earlier`: the conversations of the attempt's responses, by their ids."""
    ignored = RESPONSES_OPTIONS.checked(body)
    options = sampling_options(body, length=("max_output_tokens",), stop="stop")
    text = body.object("text")
    options |= json_format(text.object("format") if text is not None else None) or {}
    said = [*_earlier_messages(body, earlier), *_input_messages(body)]
    instructions = body.text("instructions")
    system = [{"role": "system", "content": instructions}] if instructions else []
    is_kept = body.raw("store") is not False
    asked = _request(body, [dict(message) for message in [*system, *said]], _response_tool, options, ignored=ignored)
    return replace(asked, kept=asked.messages[len(system) :] if is_kept else None)


def answer_id(turn: Turn, tag: str) -> str:
    return f"resp_{tag}_{turn.id}"


def response_answer(asked: ClientRequest, turn: Turn, tag: str) -> dict[str, Any]:
    is_cut = turn.finish == "length"
    return _response_head(asked, turn, tag) | {
        "status": "incomplete" if is_cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "output": _response_items(turn, tag),
        "usage": _response_usage(turn),
    }


def response_events(asked: ClientRequest, turn: Turn, tag: str) -> Iterator[ServerSentEvent]:
    numbers = itertools.count()
    for kind, data in _numbered_events(asked, turn, tag):
        yield ServerSentEvent({"type": kind, "sequence_number": next(numbers), **data}, kind)


def _numbered_events(asked: ClientRequest, turn: Turn, tag: str) -> Iterator[tuple[str, dict[str, Any]]]:
    nothing: dict[str, Any] = {"status": "in_progress", "incomplete_details": None, "output": [], "usage": None}
    begun = _response_head(asked, turn, tag) | nothing
    yield "response.created", {"response": begun}
    yield "response.in_progress", {"response": begun}
    for index, item in enumerate(_response_items(turn, tag)):
        yield from _item_events(index, item)
    done = response_answer(asked, turn, tag)
    yield f"response.{done['status']}", {"response": done}


def _item_events(index: int, item: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    empty: dict[str, Any] = {"arguments": ""} if item["type"] == "function_call" else {"content": []}
    yield "response.output_item.added", {"output_index": index, "item": {**item, "status": "in_progress", **empty}}
    at = {"item_id": item["id"], "output_index": index}
    if item["type"] == "function_call":
        for piece in pieces(item["arguments"]):
            yield "response.function_call_arguments.delta", {**at, "delta": piece}
        named = {"name": item["name"], "arguments": item["arguments"]}
        yield "response.function_call_arguments.done", {**at, **named}
    else:
        yield from _part_events(at | {"content_index": 0}, item["content"][0])
    yield "response.output_item.done", {"output_index": index, "item": item}


def _part_events(at: Mapping[str, Any], part: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    kind, text = part["type"], part["text"]
    more: dict[str, Any] = {"logprobs": []} if kind == "output_text" else {}
    yield "response.content_part.added", {**at, "part": {**part, "text": ""}}
    for piece in pieces(text):
        yield f"response.{kind}.delta", {**at, "delta": piece, **more}
    yield f"response.{kind}.done", {**at, "text": text, **more}
    yield "response.content_part.done", {**at, "part": part}


def _earlier_messages(body: Fields, earlier: Mapping[str, Sequence[Message]]) -> Sequence[Message]:
    name = body.text("previous_response_id")
    if name is None:
        return ()
    if name not in earlier:
        raise body.wrong("previous_response_id", "no response of this attempt that was stored has this id.")
    return earlier[name]


def _input_messages(body: Fields) -> list[dict[str, Any]]:
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
        return {
            "role": ROLES[role],
            "content": content(item, "content", TEXTS, RESPONSE_PICTURES if role == "user" else {}),
        }
    if kind == "function_call_output":
        return {
            "role": "tool", "content": content(item, "output", TEXTS, RESPONSE_PICTURES),
            "tool_call_id": item.need_text("call_id"),
        }  # fmt: skip
    raise item.wrong("type", f"{kind} cannot be read: message, reasoning, function_call or function_call_output.")


def _response_tool(tool: Fields) -> dict[str, Any]:
    _check_is_function(tool)
    return function_tool(tool)


def _response_items(turn: Turn, tag: str) -> list[dict[str, Any]]:
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


def _response_head(asked: ClientRequest, turn: Turn, tag: str) -> dict[str, Any]:
    tools = [{"type": "function", "strict": False, **tool["function"]} for tool in asked.tools]
    return {
        "id": answer_id(turn, tag), "object": "response", "created_at": int(time.time()), "model": asked.model,
        "error": None, "instructions": None, "metadata": {}, "parallel_tool_calls": True, "tool_choice": "auto",
        "tools": tools, "temperature": turn.sampling.get("temperature"), "top_p": turn.sampling.get("top_p"),
        "text": {"format": {"type": "text"}}, "truncation": "disabled",
    }  # fmt: skip


def _response_usage(turn: Turn) -> dict[str, Any]:
    read, sampled = len(turn.prompt_ids), len(turn.output_ids)
    return {
        "input_tokens": read, "output_tokens": sampled, "total_tokens": read + sampled,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens_details": {"reasoning_tokens": 0},
    }  # fmt: skip


RESPONSES = ClientProtocol(
    responses_request, response_answer, response_events, error_event="error", answer_id=answer_id
)


def messages_request(body: Fields, earlier: Mapping[str, Sequence[Message]]) -> ClientRequest:
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
    wants = frozenset({"thinking"} if thinks else ())
    return _request(body, [*_system_message(body), *said], _message_tool, options, wants=wants, ignored=ignored)


def message_answer(asked: ClientRequest, turn: Turn, tag: str) -> dict[str, Any]:
    content = {"content": _message_blocks(asked, turn), "usage": _message_usage(turn)}
    return _message_head(asked, turn, tag) | content | _stop_reason(turn)


def message_events(asked: ClientRequest, turn: Turn, tag: str) -> Iterator[ServerSentEvent]:
    start = _message_head(asked, turn, tag) | {"content": [], "stop_reason": None, "stop_sequence": None}
    yield _message_event("message_start", message=start | {"usage": _message_usage(turn) | {"output_tokens": 0}})
    for index, block in enumerate(_message_blocks(asked, turn)):
        yield from _block_events(index, block)
    yield _message_event("message_delta", delta=_stop_reason(turn), usage={"output_tokens": len(turn.output_ids)})
    yield _message_event("message_stop")


def _system_message(body: Fields) -> Iterator[dict[str, Any]]:
    value = body.raw("system")
    texts = [value] if isinstance(value, str) else [_block_text(block) for block in body.objects("system")]
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
    yield from [_assistant_message(blocks)] if role == "assistant" else _user_messages(role, blocks)


def _assistant_message(blocks: Sequence[Fields]) -> dict[str, Any]:
    said, thinking, calls = "", "", []
    for block in blocks:
        kind = block.need_text("type")
        if kind == "thinking":
            thinking += block.text("thinking") or ""
        elif kind == "tool_use":
            calls.append(tool_call(block.need_text("id"), block.need_text("name"), arguments_of(block, "input")))
        elif kind != "redacted_thinking":
            said += _block_text(block)
    return assistant(said, thinking, calls)


def _user_messages(role: str, blocks: Sequence[Fields]) -> Iterator[dict[str, Any]]:
    pieces: list[str | bytes] = []
    for block in blocks:
        if block.need_text("type") != "tool_result":
            is_picture = block.text("type") in MESSAGE_PICTURES and role == "user"
            pieces.append(of_messages(block) if is_picture else _block_text(block))
            continue
        if pieces:
            yield {"role": role, "content": in_order(pieces, "\n")}
            pieces = []
        yield {
            "role": "tool", "content": _tool_result(block),
            "tool_call_id": block.need_text("tool_use_id"),
        }  # fmt: skip
    if pieces:
        yield {"role": role, "content": in_order(pieces, "\n")}


def _tool_result(block: Fields) -> str | list[dict[str, Any]]:
    """What a tool has returned. Templates have no mark for an error: it is said in words."""
    said = content(block, "content", ("text",), MESSAGE_PICTURES)
    if not block.flag("is_error"):
        return said
    return ERROR + said if isinstance(said, str) else [{"type": "text", "text": ERROR}, *said]


def _block_text(block: Fields) -> str:
    if block.need_text("type") != "text":
        raise block.wrong("type", f"{block.text('type')} cannot be read here: the policy reads text, and pictures.")
    return block.need_text("text")


def _message_tool(tool: Fields) -> dict[str, Any]:
    if (tool.text("type") or "custom") != "custom":
        raise tool.wrong("type", f"{tool.text('type')} cannot be offered: describe a tool by its input_schema.")
    return function_tool(tool)


def _message_blocks(asked: ClientRequest, turn: Turn) -> list[dict[str, Any]]:
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


def _block_events(index: int, block: Mapping[str, Any]) -> Iterator[ServerSentEvent]:
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
    yield _message_event("content_block_start", index=index, content_block={"type": kind} | start)
    for delta in deltas:
        yield _message_event("content_block_delta", index=index, delta=delta)
    yield _message_event("content_block_stop", index=index)


def _message_event(kind: str, **data: Any) -> ServerSentEvent:
    return ServerSentEvent({"type": kind, **data}, kind)


def _message_head(asked: ClientRequest, turn: Turn, tag: str) -> dict[str, Any]:
    return {"id": f"msg_{tag}_{turn.id}", "type": "message", "role": "assistant", "model": asked.model}


def _stop_reason(turn: Turn) -> dict[str, Any]:
    if turn.finish == "length":
        reason = "max_tokens"
    elif turn.calls:
        reason = "tool_use"
    else:
        reason = "stop_sequence" if turn.stopped_by else "end_turn"
    return {"stop_reason": reason, "stop_sequence": turn.stopped_by if reason == "stop_sequence" else None}


def _message_usage(turn: Turn) -> dict[str, Any]:
    return {
        "input_tokens": len(turn.prompt_ids), "output_tokens": len(turn.output_ids),
        "cache_creation_input_tokens": 0, "cache_read_input_tokens": 0,
    }  # fmt: skip


MESSAGES = ClientProtocol(messages_request, message_answer, message_events, as_anthropic, "error", PING)

"""Conversations by the tokenizer's own chat template.

A turn goes on with its sampled tokens as they are, never with their text encoded again. The template's text between
them and the next answer is the difference of two of its texts:

    template(before, answer)                   = A          what ends an answer: after a mark in one, such as <|im_end|>
    template(before, answer, new, for answer)  = A + more

A template that does not begin the second text with the first one has rewritten its history (some strip the thinking of
earlier answers); then the sampled tokens cannot be continued. Thinking that is empty does not count, nor do line ends
before an answer: Qwen3 writes that thinking into the last answer alone, and strips line ends there; neither changes
what was said.
"""

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any

from jinja2 import TemplateError

from penstock.conf.errors import DataError, ModelError
from penstock.workers.gateway.formats.answers import EMPTY, READERS, Call, begins_thinking, split_thinking, with_ids
from penstock.workers.gateway.formats.conversation import SHORT_ID, Message, ParsedAnswer, Tools, tool_call
from penstock.workers.gateway.formats.forced import forced_call
from penstock.workers.gateway.formats.pictures import written_for_template
from penstock.workers.trajectory import Turn, encodable

NUM_BEFORE = 16
"""Number of tokens at a prompt's end that show whether it has begun the thinking, however the text is cut into
tokens."""
MARK = "\u2042"
"""Placeholder for an answer in a text of the template."""
OTHER_ENDINGS = ("<|eom_id|>",)
"""Other tokens that end an answer: of Llama 3, where it calls a tool."""
MISTRAL = "mistral"


class TemplateFormat:
    """The format of one tokenizer of transformers, or of an object with the same methods."""

    def __init__(
        self,
        tokenizer: Any,
        tool_format: str = "hermes",
        template_kwargs: Mapping[str, Any] | None = None,
        *,
        in_parts: bool = False,
    ) -> None:
        """`template_kwargs`: the template's arguments besides messages and tools, such as enable_thinking. `in_parts`:
        the template gets lists of parts, as those of models that see read them. Raises `ModelError` for a tokenizer
        without a chat template."""
        if not getattr(tokenizer, "chat_template", None):
            raise ModelError(
                "an environment needs a chat template, and the model's tokenizer has none: put chat_template.jinja "
                "into its directory, or take a model that was trained to chat."
            )
        self._tokenizer = tokenizer
        self._tool_format, self._read_calls = tool_format, READERS[tool_format]
        self._template_kwargs, self._in_parts = dict(template_kwargs or {}), in_parts

    def prompt_ids(self, messages: Sequence[Message], tools: Tools) -> list[int]:
        return self._encode(self._text(messages, tools, for_answer=True))

    def next_prompt_ids(
        self, turn: Turn, before: Sequence[Message], new: Sequence[Message], tools: Tools
    ) -> list[int] | None:
        so_far = [*before, _without_first_line_ends(turn.message)]
        closed, going_on = self._text(so_far, tools), self._text([*so_far, *new], tools, for_answer=True)
        if not going_on.startswith(closed) and not turn.message.get("reasoning_content"):
            closed = _without_last(EMPTY, closed)
        if not going_on.startswith(closed):
            return None
        more = self._encode(self._ending + going_on[len(closed) :])
        has_ended = turn.output_ids and turn.output_ids[-1] in (*more[:1], *self._other_ending_ids)
        if more and has_ended:
            more = more[1:]
        return [*turn.prompt_ids, *turn.output_ids, *more]

    def forced(self, tools: Tools, name: str) -> Mapping[str, Any]:
        return forced_call(self._tool_format, tools, name)

    def read(
        self, token_ids: Sequence[int], tools: Tools, prompt_ids: Sequence[int] = (), turn: int = 0
    ) -> ParsedAnswer:
        text = str(self._tokenizer.decode(self._without_ending(token_ids), skip_special_tokens=False))
        before = str(self._tokenizer.decode(prompt_ids[-NUM_BEFORE:], skip_special_tokens=False))
        thinking, said = split_thinking(text, begun=begins_thinking(before))
        message: dict[str, Any] = {"role": "assistant"}
        if thinking is not None:
            message["reasoning_content"] = thinking
        if not tools:
            return ParsedAnswer(message | {"content": said})
        content, found, problem = self._read_calls(said, tools)
        if len(found) > 1 and not self._takes_several:
            return ParsedAnswer(message | {"content": said}, (), "Make one call at a time.")
        calls = with_ids(found, turn)
        message["content"] = content
        if calls:
            message["tool_calls"] = [tool_call(call.id, call.name, call.arguments) for call in calls]
        return ParsedAnswer(message, calls, problem)

    @cached_property
    def _ending(self) -> str:
        """The text that the template writes directly after an answer."""
        text = self._text([{"role": "user", "content": "."}, {"role": "assistant", "content": MARK}], ())
        _, mark, ending = text.rpartition(MARK)
        if not mark:
            raise ModelError("the model's chat template leaves out what the assistant says: nothing can go on with it.")
        return ending

    @cached_property
    def _ending_id(self) -> int | None:
        ids = self._encode(self._ending)
        return ids[0] if ids else None

    @cached_property
    def _other_ending_ids(self) -> list[int]:
        ids = [self._encode(ending) for ending in OTHER_ENDINGS]
        return [one[0] for one in ids if len(one) == 1]

    @cached_property
    def _takes_several(self) -> bool:
        """True if the template allows several calls in one answer: some templates raise for more than one."""
        calls = with_ids([Call("f", {}), Call("f", {})], 0)
        said = {
            "role": "assistant",
            "content": "",
            "tool_calls": [tool_call(call.id, call.name, call.arguments) for call in calls],
        }
        results = [{"role": "tool", "content": "1", "tool_call_id": call.id, "name": "f"} for call in calls]
        try:
            self._text([{"role": "user", "content": "."}, said, *results], ())
        except DataError:
            return False
        return True

    def _without_ending(self, token_ids: Sequence[int]) -> Sequence[int]:
        ends = (self._ending_id, self._tokenizer.eos_token_id, *self._other_ending_ids)
        return token_ids[:-1] if token_ids and token_ids[-1] in ends else token_ids

    def _text(self, messages: Sequence[Message], tools: Tools, *, for_answer: bool = False) -> str:
        written = [dict(message) for message in messages]
        if self._tool_format == MISTRAL:
            written = _with_short_ids(written)
        try:
            return self._applied(written, tools, for_answer)
        except DataError as error:
            bare = _without_words_beside_calls(written)
            for other in (bare, _with_something_said(written), _with_something_said(bare)):
                if other != written:
                    with suppress(DataError):
                        return self._applied(other, tools, for_answer)
            raise error

    def _applied(self, messages: list[dict[str, Any]], tools: Tools, for_answer: bool) -> str:
        described = [dict(tool) for tool in tools] or None
        messages = [written_for_template(message, in_parts=self._in_parts) for message in messages]
        try:
            text = self._tokenizer.apply_chat_template(
                messages, tools=described, tokenize=False, add_generation_prompt=for_answer, **self._template_kwargs
            )
        except (TemplateError, TypeError) as error:
            raise DataError(f"the model's chat template does not take this conversation: {error}.") from error
        return str(text)

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer(encodable(text), add_special_tokens=False)["input_ids"])


def _without_last(pattern: re.Pattern[str], text: str) -> str:
    found = list(pattern.finditer(text))
    return text[: found[-1].start()] + text[found[-1].end() :] if found else text


def _without_first_line_ends(message: Message) -> Message:
    """The message as it is compared, in both texts, without line ends at its start; what follows it is the same."""
    return {**message, "content": str(message.get("content") or "").lstrip("\n")}


def _with_short_ids(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages with short ids for calls that a client has made, which Mistral's templates need: by their order in the
    conversation."""
    short: dict[Any, str] = {}

    def shortened(id: Any) -> str:
        return id if SHORT_ID.fullmatch(str(id)) else short.setdefault(id, f"x{len(short):08d}")

    written = []
    for message in messages:
        one = dict(message)
        if one.get("tool_calls"):
            one["tool_calls"] = [{**call, "id": shortened(call.get("id"))} for call in one["tool_calls"]]
        if one.get("role") == "tool":
            one["tool_call_id"] = shortened(one.get("tool_call_id"))
        written.append(one)
    return written


def _without_words_beside_calls(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages without text beside calls, for templates that take only one of both in an answer. The sampled tokens
    keep both, as long as a conversation goes on."""
    return [dict(one) | ({"content": ""} if one.get("tool_calls") and one.get("content") else {}) for one in messages]


def _with_something_said(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages with a space for an empty answer, for templates that take none. The sampled tokens have no space."""

    def is_of_nothing(one: Mapping[str, Any]) -> bool:
        return one.get("role") == "assistant" and not one.get("content") and not one.get("tool_calls")

    return [dict(one) | ({"content": " "} if is_of_nothing(one) else {}) for one in messages]

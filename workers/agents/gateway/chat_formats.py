"""Formats of conversations, as `environment.gateway` names them: the tokenizer's own chat template, or one by the
package `renderers`, which has a model family's chat template as code.

A turn continues with its sampled tokens as they are, never with their text encoded again. The template's text between
them and the next answer is the difference of two of its texts:

    template(before, answer)                   = A          what ends an answer: after a mark in one, such as <|im_end|>
    template(before, answer, new, for answer)  = A + more

A template that does not begin the second text with the first one has rewritten its history (some strip the thinking of
earlier answers); then the sampled tokens cannot be continued. Thinking that is empty does not count, nor do line ends
before an answer: Qwen3 writes that thinking into the last answer alone, Qwen3.5 into all answers since the last
question, and Qwen3 strips line ends there; neither changes what was said.

What a template does with tools is seen in what it writes of a conversation with one, before anything is sampled:

    a question, with a tool     is the tool described?
    a call of it                is it written, with arguments as an object or as text, and which reader reads it back?
    two calls in one answer     are both written?
    the result of the call      is it written?

`renderers` (`environment.gateway.format=FAMILY`) reads what a family writes token by token, thinking and calls in the
family's syntax, and knows which conversations continue the sampled tokens (its "bridges").
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from jinja2 import TemplateError

from penstock.conf.environment import GatewayConfig
from penstock.conf.errors import ConfigError, DataError, ModelError, suggest
from penstock.workers.agents.gateway.conversation import (
    SHORT_ID,
    ConversationFormat,
    Message,
    ParsedAnswer,
    Tools,
    call_id,
    tool_call,
    written_for_template,
)
from penstock.workers.agents.gateway.tool_calls import (
    EMPTY,
    IN_CHANNELS,
    READERS,
    ParsedCalls,
    Unreadable,
    checked_calls,
    forced_call,
    strict_json,
    with_ids,
)
from penstock.workers.agents.trajectory import ToolCall, Turn, encodable
from penstock.workers.models.tokenizer import ANSWER, QUESTION, answer_ending, begins_thinking, split_thinking

AUTO, NONE = "auto", "none"
TOOLS, CALLS, RESULTS = "the tools", "their calls", "their results"
SHOWN = 120
"""Characters of a call that a message shows."""
NAME, RESULT = "look_up_word", "marsupial"
TOOL = {"type": "function", "function": {
    "name": NAME, "description": "Looks a word up.",
    "parameters": {
        "type": "object", "properties": {"word": {"type": "string"}, "count": {"type": "integer"}},
        "required": ["word", "count"],
    },
}}  # fmt: skip
WORDS = ("quokka", "numbat")


Write = Callable[..., str]
"""Function that renders a conversation: (messages, tools), and `for_answer`. Raises `DataError` where the template does
not take it."""
NUM_BEFORE = 16
"""Number of tokens at a prompt's end that show whether it has begun the thinking, however the text is cut into
tokens."""
OTHER_ENDINGS = ("<|eom_id|>",)
"""Other tokens that end an answer: of Llama 3, where it calls a tool."""
MISTRAL = "mistral"
TEMPLATE = "template"
"""Name of the format by the tokenizer's own template."""
NO_FAMILIES = ("auto", "custom", "default")
"""Names of `renderers` that are no family: ways to choose one, and the one that never continues sampled tokens."""


@dataclass(frozen=True)
class ToolSupport:
    """What one template does with tools."""

    reader: str = ""
    """Name of the reader that reads its calls back; empty if none does."""
    call: str = ""
    """A call as it writes it, up to the end of the answer; empty if it leaves calls out."""
    ending: str | None = None
    """Text that it writes directly after a call; None: what it writes after other answers."""
    following: str = ""
    """Text that it writes after that, where the call's result follows."""
    left_out: tuple[str, ...] = (TOOLS, CALLS, RESULTS)
    """What it does not write, of tools, calls and results."""
    takes_several: bool = True
    """True if an answer may have several calls: some templates raise for more than one, others leave them out."""
    arguments_as_text: bool = False
    """True if it wants the arguments of calls as JSON text, not as an object."""

    def format_of(self, named: str) -> str:
        """Name of the reader of calls. `named`: `environment.gateway.tools`."""
        return (self.reader or NONE) if named == AUTO else named

    def refusal(self, named: str) -> str:
        """The reason why conversations with tools are refused; empty if they are not."""
        if named != AUTO:
            return "" if named == NONE or self.reader in ("", named) else (
                f"environment.gateway.tools={named}: the model's chat template writes calls as {self.reader}, which "
                f"{named} does not read. Say auto."
            )  # fmt: skip
        if self.reader and RESULTS not in self.left_out:
            return ""
        faults = [f"leaves out {_listed(self.left_out)}"] if self.left_out else []
        if self.call and not self.reader:
            faults.append(f"writes calls in a way that no reader knows: {self.call[:SHOWN]!r}")
        known = ", ".join(name for name in READERS if name != NONE)
        return (
            f"environment.gateway.tools=auto: the model's chat template {' and '.join(faults)}. Take a model whose "
            f"template has tools, or name the way in which this one writes calls: {known}."
        )

    def describe(self, named: str) -> str:
        """How calls are read, and what the template leaves out."""
        if refusal := self.refusal(named):
            return f"an environment that offers tools is refused. {refusal}"
        left_out = self.left_out if self.format_of(named) != NONE else ()
        remark = f"; the model's chat template leaves out {_listed(left_out)}, so write them into messages"
        return f"calls are read as {self.format_of(named)}{remark if left_out else ''}"


def tool_support(write: Write) -> ToolSupport:
    """Render the conversations, and look for what is in them."""
    question = _written(write, [QUESTION], for_answer=True)
    plain = _written(write, [QUESTION, {"role": "assistant", "content": ANSWER}])
    after_content = plain.rpartition(ANSWER)[2]
    found = [_call_written(write, question, plain, after_content, as_text) for as_text in (False, True)]
    chosen = next((one for one in found if one.reader), None) or next((one for one in found if one.call), found[0])
    one, both = (_said(words, chosen.arguments_as_text) for words in (WORDS[:1], WORDS))
    closed, together = _written(write, [QUESTION, one]), _written(write, [QUESTION, both])
    result = {"role": "tool", "content": RESULT, "tool_call_id": call_id(0, 0), "name": NAME}
    with_result = _written(write, [QUESTION, one, result], for_answer=True)
    is_there = {TOOLS: NAME in question, CALLS: bool(chosen.call), RESULTS: RESULT in with_result}
    return replace(
        chosen,
        following=with_result[len(closed) :] if with_result.startswith(closed) else "",
        left_out=tuple(what for what, written in is_there.items() if not written),
        takes_several=all(word in together for word in WORDS) if chosen.call else bool(together),
    )


def with_arguments_as_text(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages whose calls have their arguments as JSON text."""
    return [
        {**message, "tool_calls": [_with_text(call) for call in calls]}
        if (calls := message.get("tool_calls"))
        else dict(message)
        for message in messages
    ]


def _with_text(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    return {**call, "function": {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}}


def _call_written(write: Write, question: str, plain: str, after_content: str, as_text: bool) -> ToolSupport:
    """What is found of one call."""
    text = _written(write, [QUESTION, _said(WORDS[:1], as_text)])
    begin = min(_num_common(question, text), _num_common(plain, text))
    written = ToolSupport(call=text[begin:], arguments_as_text=as_text)
    if WORDS[0] not in written.call:
        return ToolSupport()
    for name in READERS:
        if (rest := _rest(name, written.call)) is not None:
            begin = written.call.rfind(rest) if rest else len(written.call)
            return replace(written, reader=name, ending=written.call[begin:] if begin >= 0 else None)
        if after_content and _rest(name, written.call.removesuffix(after_content)) is not None:
            return replace(written, reader=name)
    return written


def _num_common(one: str, other: str) -> int:
    """Number of characters that two texts begin with alike."""
    pairs = zip(one, other, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def _listed(words: Sequence[str]) -> str:
    """The words as a sentence lists them.

    >>> _listed(["one", "two", "three"])
    'one, two and three'
    """
    return " and ".join([", ".join(words[:-1]), *words[-1:]]) if len(words) > 1 else "".join(words)


def _rest(reader: str, answer: str) -> str | None:
    """What is left of an answer when its call is taken out; None where it is not read as the one that was written."""
    said = answer if reader in IN_CHANNELS else split_thinking(answer)[1]
    rest, calls, problem = READERS[reader](said, [TOOL])
    if problem or [(call.name, call.arguments) for call in calls] != [(NAME, _arguments(WORDS[0]))]:
        return None
    return rest


def _arguments(word: str) -> dict[str, Any]:
    return {"word": word, "count": 41}


def _said(words: Sequence[str], as_text: bool) -> dict[str, Any]:
    calls = [tool_call(call_id(0, index), NAME, _arguments(word)) for index, word in enumerate(words)]
    message = {"role": "assistant", "content": "", "tool_calls": calls}
    return with_arguments_as_text([message])[0] if as_text else message


def _written(write: Write, messages: Sequence[Message], *, for_answer: bool = False) -> str:
    """The text; empty where the template does not take the conversation."""
    try:
        return write(messages, [TOOL], for_answer=for_answer)
    except DataError:
        return ""


class TemplateFormat:
    """The format of one tokenizer of transformers, or of an object with the same methods."""

    def __init__(
        self,
        tokenizer: Any,
        tool_format: str = AUTO,
        template_kwargs: Mapping[str, Any] | None = None,
        *,
        in_parts: bool = False,
    ) -> None:
        """`tool_format`: `environment.gateway.tools`. `template_kwargs`: the template's arguments besides messages and
        tools, such as enable_thinking. `in_parts`: the template gets lists of parts, as those of models that see read
        them. Raises `ModelError` for a tokenizer without a chat template."""
        if not getattr(tokenizer, "chat_template", None):
            raise ModelError(
                "an environment needs a chat template, and the model's tokenizer has none: put chat_template.jinja "
                "into its directory, or take a model that was trained to chat."
            )
        self._tokenizer = tokenizer
        self._named_format = tool_format
        self._template_kwargs, self._in_parts = dict(template_kwargs or {}), in_parts

    def prompt_ids(self, messages: Sequence[Message], tools: Tools) -> list[int]:
        return self._encode(self._text(messages, tools, for_answer=True))

    def next_prompt_ids(
        self, turn: Turn, before: Sequence[Message], new: Sequence[Message], tools: Tools
    ) -> list[int] | None:
        so_far = [*before, _without_first_line_ends(turn.message)]
        closed, going_on = self._text(so_far, tools), self._text([*so_far, *new], tools, for_answer=True)
        written = [closed] if turn.message.get("reasoning_content") else _without_last(EMPTY, closed)
        closed = next((text for text in written if going_on.startswith(text)), "")
        if not closed:
            return None
        more = self._encode(self._ending_after(turn.message) + going_on[len(closed) :])
        has_ended = turn.output_ids and turn.output_ids[-1] in (*more[:1], *self._other_ending_ids)
        if more and has_ended:
            more = more[1:]
        return [*turn.prompt_ids, *turn.output_ids, *more]

    def forced(self, tools: Tools, name: str) -> Mapping[str, Any]:
        return forced_call(self.tool_format, tools, name)

    def read(
        self, token_ids: Sequence[int], tools: Tools, prompt_ids: Sequence[int] = (), turn: int = 0
    ) -> ParsedAnswer:
        text = str(self._tokenizer.decode(self._without_ending(token_ids, tools), skip_special_tokens=False))
        before = str(self._tokenizer.decode(prompt_ids[-NUM_BEFORE:], skip_special_tokens=False))
        thinking, said, (content, found, problem) = self._parts(text, tools, begun=begins_thinking(before))
        if not tools:
            return _parsed(thinking, said)
        if len(found) > 1 and not self.tool_support.takes_several:
            return _parsed(thinking, said, (), "Make one call at a time.")
        return _parsed(thinking, content, with_ids(found, turn), problem)

    def _parts(self, text: str, tools: Tools, *, begun: bool) -> tuple[str | None, str, ParsedCalls]:
        """The thinking, what was said, and what is read of that."""
        if tools and self.tool_format in IN_CHANNELS:
            rest, found, problem = READERS[self.tool_format](text, tools)
            thinking, said = split_thinking(rest, begun=begun)
            return thinking, said, (said, found, problem)
        thinking, said = split_thinking(text, begun=begun)
        return thinking, said, READERS[self.tool_format](said, tools) if tools else (said, [], "")

    @cached_property
    def tool_support(self) -> ToolSupport:
        """What the template does with tools."""
        return tool_support(self._rendered)

    @cached_property
    def tool_format(self) -> str:
        """Name of the reader of calls: the one that was named, or the one that fits the template."""
        return self.tool_support.format_of(self._named_format)

    @cached_property
    def refusal(self) -> str:
        """The reason why no conversation with tools is taken; empty where they are."""
        return self.tool_support.refusal(self._named_format)

    def describe_tools(self) -> str:
        """How calls are read, and what the template leaves out."""
        return self.tool_support.describe(self._named_format)

    @cached_property
    def _ending(self) -> str:
        """The text that the template writes directly after an answer."""
        return answer_ending(lambda messages: self._rendered(messages, ()), ": nothing can go on with it.")

    def _ending_after(self, message: Message) -> str:
        ending = self.tool_support.ending if message.get("tool_calls") else None
        return self._ending if ending is None else ending

    def _without_ending(self, token_ids: Sequence[int], tools: Tools) -> Sequence[int]:
        ends = (self._tokenizer.eos_token_id, *self._ending_ids, *(self._call_ending_ids if tools else ()))
        return token_ids[:-1] if token_ids and token_ids[-1] in ends else token_ids

    @cached_property
    def _ending_ids(self) -> list[int]:
        """Tokens that end an answer: what the template writes first behind it."""
        return [*self._encode(self._ending or self._following)[:1], *self._other_ending_ids]

    @cached_property
    def _call_ending_ids(self) -> list[int]:
        """The same of an answer that calls a tool."""
        support = self.tool_support
        return [] if support.ending is None else self._encode(support.ending or support.following)[:1]

    @cached_property
    def _following(self) -> str:
        """The text that the template writes after an answer, where a question follows."""
        try:
            text = self._rendered([QUESTION, {"role": "assistant", "content": ANSWER}, QUESTION], ())
        except DataError:
            return ""
        return text.rpartition(ANSWER)[2]

    @cached_property
    def _other_ending_ids(self) -> list[int]:
        return [ids[0] for ending in OTHER_ENDINGS if len(ids := self._encode(ending)) == 1]

    def _text(self, messages: Sequence[Message], tools: Tools, *, for_answer: bool = False) -> str:
        if (tools or any(message.get("role") == "tool" for message in messages)) and self.refusal:
            raise DataError(self.refusal)
        written = [dict(message) for message in messages]
        if any(message.get("tool_calls") for message in messages):
            if self.tool_format == MISTRAL:
                written = _with_short_ids(written)
            if self.tool_support.arguments_as_text:
                written = with_arguments_as_text(written)
        return self._rendered(written, tools, for_answer=for_answer)

    def _rendered(self, messages: Sequence[Message], tools: Tools, *, for_answer: bool = False) -> str:
        written = [dict(message) for message in messages]
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
        except (TemplateError, TypeError, ValueError, LookupError, AttributeError) as error:
            raise DataError(f"the model's chat template does not take this conversation: {error}.") from error
        return str(text)

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer(encodable(text), add_special_tokens=False)["input_ids"])


def _without_last(pattern: re.Pattern[str], text: str) -> Iterator[str]:
    """The text without the last 0, 1, 2, … places where the pattern is found."""
    yield text
    for match in reversed(list(pattern.finditer(text))):
        text = text[: match.start()] + text[match.end() :]
        yield text


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
    keep both, as long as a conversation continues."""
    return [dict(one) | ({"content": ""} if one.get("tool_calls") and one.get("content") else {}) for one in messages]


def _with_something_said(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages with a space for an empty answer, for templates that take none. The sampled tokens have no space."""

    def is_of_nothing(one: Mapping[str, Any]) -> bool:
        return one.get("role") == "assistant" and not one.get("content") and not one.get("tool_calls")

    return [dict(one) | ({"content": " "} if is_of_nothing(one) else {}) for one in messages]


def make_format(
    tokenizer: Any, config: GatewayConfig, template_kwargs: Mapping[str, Any] | None = None, *, sees: bool = False
) -> ConversationFormat:
    """Make the format. `template_kwargs`: `model.chat_template_kwargs`. `sees`: conversations may have pictures. Raises
    `ConfigError` for a family that is not known, for pictures in one, or for calls that the template writes in another
    way, `ModelError` for a model that cannot chat."""
    if config.format == TEMPLATE:
        form = TemplateFormat(tokenizer, config.tools, template_kwargs, in_parts=sees)
        if config.tools != AUTO and form.refusal:
            raise ConfigError(form.refusal)
        return form
    if sees:
        raise ConfigError(
            f"environment.gateway.format={config.format}: pictures are written by the model's own chat template alone. "
            "Say template, or rollout.max_pictures=0."
        )
    return RenderedFormat(tokenizer, config.format, template_kwargs)


class RenderedFormat:
    """The format of one tokenizer and a family."""

    refusal = ""

    def __init__(self, tokenizer: Any, family: str, template_kwargs: Mapping[str, Any] | None = None) -> None:
        """`template_kwargs`: of the family, such as enable_thinking. Raises `ConfigError` for a family that is not
        known or is not the tokenizer's, or has no such arguments."""
        self._tokenizer, self._family = tokenizer, family
        self._renderer = _renderer(tokenizer, family, template_kwargs or {})

    def describe_tools(self) -> str:
        return f"calls are read by the package renderers, as {self._family} writes them"

    def prompt_ids(self, messages: Sequence[Message], tools: Tools) -> list[int]:
        return list(self._written(self._renderer.render_ids, encodable(messages), tools, add_generation_prompt=True))

    def next_prompt_ids(
        self, turn: Turn, before: Sequence[Message], new: Sequence[Message], tools: Tools
    ) -> list[int] | None:
        so_far = [*turn.prompt_ids, *turn.output_ids]
        bridge = self._renderer.bridge_to_next_turn
        rendered = self._written(bridge, list(turn.prompt_ids), tools, list(turn.output_ids), encodable(new))
        if rendered is None:
            return None
        ids = list(rendered.token_ids)
        return ids if ids[: len(so_far)] == so_far else None  # it cuts what was sampled after the end of an answer

    def forced(self, tools: Tools, name: str) -> Mapping[str, Any]:
        return forced_call(self._family, tools, name)

    def read(
        self, token_ids: Sequence[int], tools: Tools, prompt_ids: Sequence[int] = (), turn: int = 0
    ) -> ParsedAnswer:
        try:
            parsed = self._renderer.parse_response(list(token_ids), tools=_or_none(tools), prompt_ids=list(prompt_ids))
        except RecursionError:
            return _parsed(None, self._text(token_ids), (), "The call is nested too deeply.")
        thinking = parsed.reasoning_content
        said = split_thinking(self._text(token_ids))[1] if parsed.tool_calls else parsed.content
        if not (tools and parsed.tool_calls):
            return _parsed(thinking, said)
        found = [_call(call) for call in parsed.tool_calls]
        content, values, problem = checked_calls(parsed.content, found, tools, said)
        return _parsed(thinking, content, with_ids(values, turn), problem)

    def _written(self, write: Callable[..., Any], first: Any, tools: Tools, *more: Any, **named: Any) -> Any:
        try:
            return write(first, *more, tools=_or_none(encodable(tools)), **named)
        except (ValueError, TypeError, KeyError) as error:
            raise DataError(f"the model's chat format does not take this conversation: {error}.") from error

    def _text(self, token_ids: Sequence[int]) -> str:
        """The text of an answer, without the token that ended it."""
        ends = set(self._renderer.get_stop_token_ids())
        ids = token_ids[:-1] if token_ids and token_ids[-1] in ends else token_ids
        return str(self._tokenizer.decode(ids, skip_special_tokens=False))


def _parsed(
    thinking: str | None, content: str | None, calls: Sequence[ToolCall] = (), problem: str = ""
) -> ParsedAnswer:
    message: dict[str, Any] = {"role": "assistant"}
    if thinking is not None:
        message["reasoning_content"] = thinking
    message["content"] = content
    if calls:
        message["tool_calls"] = [tool_call(call.id, call.name, call.arguments) for call in calls]
    return ParsedAnswer(message, calls, problem)


def _renderer(tokenizer: Any, family: str, template_kwargs: Mapping[str, Any]) -> Any:
    try:
        from renderers import base, configs
    except ImportError as error:
        raise ConfigError(
            f"environment.gateway.format={family}: it needs the package renderers: {error}. Install it with "
            "`pip install renderers`, or say template."
        ) from error
    base._populate_registry()
    known = {name for name in base.RENDERER_REGISTRY if name not in NO_FAMILIES}
    if family not in known:
        raise ConfigError(
            f"environment.gateway.format={family}: the package renderers knows no family of this name"
            f"{suggest(family, known)} The families are: {', '.join(sorted(known))}; or say template."
        )
    config = configs.config_from_name(family)
    for name in template_kwargs:
        if name not in (taken := config.template_field_names()):
            raise ConfigError(
                f"model.chat_template_kwargs.{name}: {family} of the package renderers takes no such argument"
                f"{suggest(name, taken)}"
            )
    try:
        config = type(config)(**template_kwargs)
    except ValueError as error:
        raise ConfigError(f"model.chat_template_kwargs={dict(template_kwargs)}: {error}") from error
    try:
        return base.create_renderer(tokenizer, config)
    except (AssertionError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(
            f"environment.gateway.format={family}: the model's tokenizer is none of this family: {error}. Say "
            "template, which takes the tokenizer's own chat template."
        ) from error


def _call(parsed: Any) -> Any:
    """A call in the form that `found` takes."""
    if parsed.status != "ok" and parsed.status != "unknown_tool":
        return Unreadable(f"The call cannot be read ({str(parsed.status).replace('_', ' ')}).")
    try:
        arguments = parsed.arguments if isinstance(parsed.arguments, str) else json.dumps(parsed.arguments)
        return {"name": parsed.name, "arguments": strict_json(arguments)}
    except (ValueError, TypeError, RecursionError) as error:
        return Unreadable(f"The arguments of {parsed.name} are no JSON: {error}.")


def _or_none(tools: Tools) -> list[dict[str, Any]] | None:
    return [dict(tool) for tool in tools] or None

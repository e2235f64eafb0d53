"""What a chat template does with tools, told by what it writes of a conversation with one. It is rendered once, before
anything is sampled.

    a question, with a tool     is the tool described?
    a call of it                is it written, with arguments as an object or as text, and which reader reads it back?
    two calls in one answer     are both written?
    the result of the call      is it written?
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from penstock.conf.errors import DataError
from penstock.workers.gateway.formats.answers import split_thinking
from penstock.workers.gateway.formats.conversation import Message, Tools, call_id, tool_call
from penstock.workers.gateway.formats.readers import IN_CHANNELS, READERS

AUTO, NONE = "auto", "none"
TOOLS, CALLS, RESULTS = "the tools", "their calls", "their results"
SHOWN = 120
"""Characters of a call that a message shows."""
MARK = "\u2042"
"""Placeholder for an answer in a text of the template."""
NAME, RESULT = "look_up_word", "marsupial"
TOOL = {"type": "function", "function": {
    "name": NAME, "description": "Looks a word up.",
    "parameters": {
        "type": "object", "properties": {"word": {"type": "string"}, "count": {"type": "integer"}},
        "required": ["word", "count"],
    },
}}  # fmt: skip
WORDS = ("quokka", "numbat")
QUESTION = {"role": "user", "content": "."}


class Write(Protocol):
    def __call__(self, messages: Sequence[Message], tools: Tools, *, for_answer: bool = False) -> str:
        """Render a conversation. Raises `DataError` where the template does not take it."""


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
    plain = _written(write, [QUESTION, {"role": "assistant", "content": MARK}])
    after_content = plain.rpartition(MARK)[2]
    found = [_call_written(write, question, plain, after_content, as_text) for as_text in (False, True)]
    chosen = next((one for one in found if one.reader), None) or next((one for one in found if one.call), found[0])
    one, both = (_said(words, chosen.arguments_as_text) for words in (WORDS[:1], WORDS))
    closed, together = _written(write, [QUESTION, one]), _written(write, [QUESTION, both])
    result = {"role": "tool", "content": RESULT, "tool_call_id": call_id(0, 0), "name": NAME}
    told = _written(write, [QUESTION, one, result], for_answer=True)
    is_there = {TOOLS: NAME in question, CALLS: bool(chosen.call), RESULTS: RESULT in told}
    return replace(
        chosen,
        following=told[len(closed) :] if told.startswith(closed) else "",
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

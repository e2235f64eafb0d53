"""Readers of calls that a model family writes with marks of its own, and the table of all readers. Names are those that
vLLM has for the same formats (`--tool-call-parser`).

    qwen3_coder   <tool_call><function=add><parameter=a>1</parameter></function></tool_call>
                                                                              Qwen3-Coder, Qwen3.5 and newer, Nemotron 3
    glm45         <tool_call>add<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>                    GLM-4.5
    muse_glimmer  <atem:invoke name="add"><atem:parameter name="a">1</atem:parameter></atem:invoke>
    deepseek_v3   <｜tool▁call▁begin｜>function<｜tool▁sep｜>add ```json {"a": 1} ```<｜tool▁call▁end｜>      V3
                  <｜tool▁call▁begin｜>add<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜>                     V3.1
    gemma4        <|tool_call>call:add{a:1,b:<|"|>text<|"|>}<tool_call|>
    lfm2          <|tool_call_start|>[add(a=1)]<|tool_call_end|>
    openai        <|start|>assistant to=functions.add<|channel|>commentary json<|message|>{"a": 1}<|call|>       gpt-oss

Where the marks tell no types, the tool's schema does: text stays text, everything else is JSON.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.workers.gateway.formats.answers import (
    Found,
    Reader,
    Unreadable,
    checked_calls,
    hermes,
    llama3_json,
    mistral,
    none,
    python_calls,
    pythonic,
    strict_json,
)
from penstock.workers.gateway.formats.conversation import Tools

GEMMA_QUOTE = '<|"|>'
PYTHON = {"True": True, "False": False, "None": None}
"""Values that some templates write as Python does."""
JSON_TYPES: Mapping[type, Sequence[str]] = {
    bool: ("boolean",), int: ("integer", "number"), float: ("number",), list: ("array",), dict: ("object",),
    type(None): ("null",),
}  # fmt: skip


@dataclass(frozen=True)
class _Span:
    """A call in a text."""

    start: int
    end: int
    value: Any
    """The call in the form that `checked_calls` takes."""


@dataclass(frozen=True)
class _ByArgument:
    """Calls that are written as a name and a pair of marks around each argument. A text is read once from its begin to
    its end: patterns that may match in several ways would take exponential time on some texts."""

    begin: re.Pattern[str]
    """Pattern whose group is the tool's name."""
    argument: re.Pattern[str]
    """Pattern before a value, whose group is the argument's name."""
    close: re.Pattern[str]
    """Pattern after a value."""
    end: re.Pattern[str]

    def __call__(self, text: str, tools: Tools) -> Iterator[_Span]:
        at = 0
        while begun := self.begin.search(text, at):
            name, at, arguments = begun[1], begun.end(), {}
            while argument := self.argument.match(text, at):
                closed = self.close.search(text, argument.end())
                if closed is None:
                    break
                value = text[argument.end() : closed.start()]
                arguments[argument[1]] = _typed(value, _types_of(tools, name, argument[1]))
                at = closed.end()
            if ended := self.end.match(text, at):
                at = ended.end()
                yield _Span(begun.start(), at, {"name": name, "arguments": arguments})


def _by_pattern(pattern: str, value: Callable[[re.Match[str], Tools], Any]) -> Callable[[str, Tools], Iterator[_Span]]:
    """Calls that each match a pattern."""
    compiled = re.compile(pattern, re.DOTALL)

    def found(text: str, tools: Tools) -> Iterator[_Span]:
        return (_Span(match.start(), match.end(), value(match, tools)) for match in compiled.finditer(text))

    return found


def _reader(marks: Sequence[str], example: str, spans_of: Callable[[str, Tools], Iterator[_Span]]) -> Reader:
    """The reader of a format. `marks`: each shows that a call begins. `example`: what the model is told of a call that
    is not whole."""

    def read(text: str, tools: Tools) -> Found:
        if not any(mark in text for mark in marks):
            return text, [], ""
        said, at, values = "", 0, []
        for span in spans_of(text, tools):
            said, at = said + text[at : span.start], span.end
            values += span.value if isinstance(span.value, list) else [span.value]
        said += text[at:]
        if any(mark in said for mark in marks):
            values.append(Unreadable(f"A call is not whole. It is written as {example}."))
        return checked_calls(said.strip(), values, tools, text)

    return read


def _typed(text: str, types: set[str]) -> Any:
    """The value of an argument. `types`: of its schema; empty: not known."""
    if types == {"string"}:
        return text
    bare = text.strip()
    try:
        value = PYTHON[bare] if bare in PYTHON else strict_json(bare)
    except ValueError:
        return text
    return text if "string" in types and not types & {*JSON_TYPES.get(type(value), ())} else value


def _types_of(tools: Tools, name: str, argument: str) -> set[str]:
    for tool in tools:
        if tool["function"]["name"] == name:
            return _types(_at(_at(_at(tool["function"], "parameters"), "properties"), argument))
    return set()


def _types(schema: Mapping[str, Any]) -> set[str]:
    """The types that a schema names. It comes from clients: what is no schema names none."""
    kind = schema.get("type")
    kinds = kind if isinstance(kind, list) else [kind]
    own = {one for one in kinds if isinstance(one, str)}
    for name in ("anyOf", "oneOf"):
        inner = schema.get(name)
        for one in inner if isinstance(inner, list) else ():
            own |= _types(one) if isinstance(one, Mapping) else set()
    return own


def _at(holder: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = holder.get(name)
    return value if isinstance(value, Mapping) else {}


def _json_call(match: re.Match[str], tools: Tools) -> Any:
    """A call whose first group that has matched is its name, and the next its arguments as JSON."""
    name, arguments = (group for group in match.groups() if group is not None)
    return {"name": name.strip(), "arguments": arguments}


def _python_calls(match: re.Match[str], tools: Tools) -> list[Any]:
    try:
        return python_calls(match[1].strip(), tools)
    except Unreadable as problem:
        return [problem]


def _gemma_call(match: re.Match[str], tools: Tools) -> Any:
    try:
        return {"name": match[1], "arguments": strict_json(_gemma_json(match[2]))}
    except ValueError as error:
        return Unreadable(f"The arguments of {match[1]} cannot be read: {error}.")


def _gemma_json(text: str) -> str:
    """JSON of what Gemma writes: names are bare, and texts stand between marks."""
    pieces = text.split(GEMMA_QUOTE)
    bare = [re.sub(r"([{,]\s*)([^\s{}\[\],:\"]+)(\s*:)", r'\1"\2"\3', piece) for piece in pieces[::2]]
    bare = [re.sub(r"(?<=[:\[,])\s*None(?=[,\]}])", "null", piece) for piece in bare]
    quoted = [json.dumps(piece) for piece in pieces[1::2]]
    return "".join(one + other for one, other in zip(bare, [*quoted, ""], strict=False))


READERS: dict[str, Reader] = {
    "hermes": hermes,
    "llama3_json": llama3_json,
    "mistral": mistral,
    "pythonic": pythonic,
    "qwen3_coder": _reader(
        ("<function=", "<tool_call>"),
        "<tool_call><function=NAME><parameter=ARGUMENT>VALUE</parameter></function></tool_call>",
        _ByArgument(
            re.compile(r"(?:<tool_call>\s*)?<function=([^>\n]+)>\s*"),
            re.compile(r"<parameter=([^>\n]+)>\n?"),
            re.compile(r"\n?</parameter>\s*"),
            re.compile(r"</function>(?:\s*</tool_call>)?"),
        ),
    ),
    "glm45": _reader(
        ("<tool_call>",),
        "<tool_call>NAME<arg_key>ARGUMENT</arg_key><arg_value>VALUE</arg_value></tool_call>",
        _ByArgument(
            re.compile(r"<tool_call>\s*([^\s<{]+)\s*"),
            re.compile(r"<arg_key>\s*([^<]+?)\s*</arg_key>\s*<arg_value>"),
            re.compile(r"</arg_value>\s*"),
            re.compile(r"</tool_call>"),
        ),
    ),
    "muse_glimmer": _reader(
        ("<atem:invoke", "<atem:function_calls>"),
        '<atem:function_calls><atem:invoke name="NAME"><atem:parameter name="ARGUMENT">VALUE</atem:parameter>'
        "</atem:invoke></atem:function_calls>",
        _ByArgument(
            re.compile(
                r"(?:(?:<\|eom\|>)?<\|start\|>assistant)?(?: to=[^<\s]+<\|message\|>)?(?:<atem:function_calls>\s*)?"
                r'<atem:invoke name="([^">\n]+)">\s*'
            ),
            re.compile(r'<atem:parameter name="([^">\n]+)">'),
            re.compile(r"</atem:parameter>\s*"),
            re.compile(r"</atem:invoke>(?:\s*</atem:function_calls>)?"),
        ),
    ),
    "deepseek_v3": _reader(
        ("<｜tool▁call▁begin｜>", "<｜tool▁calls▁begin｜>"),
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME, and the arguments as JSON in a block of code",
        _by_pattern(
            r"(?:<｜tool▁calls▁begin｜>)?\s*<｜tool▁call▁begin｜>"
            r"(?:function<｜tool▁sep｜>([^\n]+)\n```json\n(.*?)\n```\s*|([^<\n]+)<｜tool▁sep｜>(.*?))"
            r"<｜tool▁call▁end｜>(?:\s*<｜tool▁calls▁end｜>)?",
            _json_call,
        ),
    ),
    "gemma4": _reader(
        ("<|tool_call>",),
        "<|tool_call>call:NAME{ARGUMENT:VALUE}<tool_call|>",
        _by_pattern(r"<\|tool_call>\s*call:([^\s{]+)\s*(\{.*?\})\s*<tool_call\|>", _gemma_call),
    ),
    "lfm2": _reader(
        ("<|tool_call_start|>",),
        "<|tool_call_start|>[NAME(ARGUMENT=VALUE)]<|tool_call_end|>",
        _by_pattern(r"<\|tool_call_start\|>(.*?)<\|tool_call_end\|>", _python_calls),
    ),
    "openai": _reader(
        ("to=functions.",),
        "<|channel|>commentary to=functions.NAME<|message|>, the arguments as JSON, <|call|>",
        _by_pattern(
            r"(?:<\|end\|>)?(?:<\|start\|>assistant)?(?:<\|channel\|>\w+)?\s*to=functions\.([\w.-]+)"
            r"(?:<\|channel\|>\w+)?\s*(?:<\|constrain\|>)?\s*(?:json)?\s*<\|message\|>(.*?)(?:<\|call\|>|\Z)",
            _json_call,
        ),
    ),
    "none": none,
}
IN_CHANNELS = ("muse_glimmer", "openai")
"""Formats that write calls into channels of their own, behind a thinking that has no other end."""

"""Calls of tools in the syntax of each model family: read from an answer's text, and forced by a structure. Names are
those that vLLM has for the same formats (`--tool-call-parser`).

    hermes        <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>     Hermes, Qwen
    llama3_json   {"name": "add", "parameters": {"a": 1}}                           Llama 3, the whole answer
    mistral       [TOOL_CALLS][{"name": "add", "arguments": {"a": 1}, "id": "sV1hLtRz8"}]
                  [TOOL_CALLS]add[CALL_ID]sV1hLtRz8[ARGS]{"a": 1}                    newer ones; the id may be left out
    pythonic      [add(a=1), add(2)]                                                Llama 3.2 and 4, the whole answer
    qwen3_coder   <tool_call><function=add><parameter=a>1</parameter></function></tool_call>
                                                                              Qwen3-Coder, Qwen3.5 and newer, Nemotron 3
    glm45         <tool_call>add<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>                    GLM-4.5
    muse_glimmer  <atem:invoke name="add"><atem:parameter name="a">1</atem:parameter></atem:invoke>
    deepseek_v3   <｜tool▁call▁begin｜>function<｜tool▁sep｜>add ```json {"a": 1} ```<｜tool▁call▁end｜>      V3
                  <｜tool▁call▁begin｜>add<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜>                     V3.1
    gemma4        <|tool_call>call:add{a:1,b:<|"|>text<|"|>}<tool_call|>
    lfm2          <|tool_call_start|>[add(a=1)]<|tool_call_end|>
    openai        <|start|>assistant to=functions.add<|channel|>commentary json<|message|>{"a": 1}<|call|>       gpt-oss

A reader takes a text and tools, and returns the rest of the text, calls, and a problem. A call that cannot be read, or
of an unknown tool, is a problem in a sentence for the model. Where the marks have no types, the tool's schema decides:
text stays text, everything else is JSON.
"""

import ast
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from penstock.conf.errors import SamplingError, suggest
from penstock.workers.agents.gateway.conversation import SHORT_ID, Tools, call_id
from penstock.workers.agents.trajectory import ToolCall

EMPTY = re.compile(r"<think>\s*</think>\n*")
"""Pattern of empty thinking, as templates write it."""
_HERMES = re.compile(r"<tool_call>\s*(.*?)\s*(?:</tool_call>|\Z)", re.DOTALL)
MISTRAL = "[TOOL_CALLS]"
_NAMED = re.compile(r"\s*([^\[\]{}\s]+)\s*(?:\[CALL_ID\]\s*([a-zA-Z0-9]*)\s*)?\[ARGS\](.*)\Z", re.DOTALL)
MAX_NESTING = 64
"""Deepest nesting of arguments. Deeper ones would exceed Python's stack when they are written again."""
GEMMA_QUOTE = '<|"|>'
PYTHON = {"True": True, "False": False, "None": None}
"""Values that some templates write as Python does."""
JSON_TYPES: Mapping[type, Sequence[str]] = {
    bool: ("boolean",), int: ("integer", "number"), float: ("number",), list: ("array",), dict: ("object",),
    type(None): ("null",),
}  # fmt: skip
IN_CHANNELS = ("muse_glimmer", "openai")
"""Formats that write calls into channels of their own, behind a thinking that has no other end."""
ANY = "*"
"""Stands for the name of a tool: one of them has to be called, whichever."""
NO_PARAMETERS = {"type": "object", "properties": {}}


class ParsedCall(NamedTuple):
    name: str
    arguments: dict[str, Any]
    id: str = ""
    """Id that the model has given it; empty if it gave none that templates accept."""


Calls = list[ParsedCall]
ParsedCalls = tuple[str, Calls, str]
"""The text without its calls, the calls, and why a call could not be read."""
Reader = Callable[[str, Tools], ParsedCalls]


class Unreadable(Exception):
    """The error for a call that cannot be read, with the text that the model gets."""


def hermes(text: str, tools: Tools) -> ParsedCalls:
    return checked_calls(_HERMES.sub("", text).strip(), [_loaded(body) for body in _HERMES.findall(text)], tools, text)


def llama3_json(text: str, tools: Tools) -> ParsedCalls:
    bare = text.removeprefix("<|python_tag|>").strip()
    if not bare.startswith("{"):
        return text, [], ""
    return checked_calls("", [_loaded(part) for part in bare.split(";\n")], tools, text)


def mistral(text: str, tools: Tools) -> ParsedCalls:
    said, mark, body = text.partition(MISTRAL)
    if not mark:
        return text, [], ""
    is_list = body.lstrip().startswith(("[", "{")) or "[ARGS]" not in body
    values = _list(body) if is_list else [_named(one) for one in body.split(MISTRAL)]
    return checked_calls(said.strip(), values, tools, text)


def _named(body: str) -> Any:
    match = _NAMED.match(body)
    if match is None:
        return Unreadable("A call is the tool's name, [ARGS], and an object with its arguments.")
    name, id, arguments = match.groups()
    return {"name": name, "id": id, "arguments": _loaded(arguments)}


def _list(body: str) -> list[Any]:
    values = _loaded(body)
    return values if isinstance(values, list) else [values]


def pythonic(text: str, tools: Tools) -> ParsedCalls:
    bare = text.strip()
    if not (bare.startswith("[") and bare.endswith("]") and "(" in bare):
        return text, [], ""
    try:
        return checked_calls("", python_calls(bare, tools), tools, text)
    except Unreadable as problem:
        return text, [], str(problem)


def python_calls(text: str, tools: Tools) -> list[Any]:
    """The calls of a list that is written as Python writes it. Raises `Unreadable`."""
    try:
        tree = ast.parse(text, mode="eval").body
        nodes = tree.elts if isinstance(tree, ast.List) else []
        return [_of_python(node, tools) for node in nodes]
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError, Unreadable) as error:
        raise Unreadable(f"The call is no Python: {error}.") from error


def none(text: str, tools: Tools) -> ParsedCalls:
    return text, [], ""


def checked_calls(said: str, values: Sequence[Any], tools: Tools, text: str = "") -> ParsedCalls:
    """Make calls of values. An invalid one makes all invalid: the model has to say which calls to make."""
    try:
        return said, [_call(value, tools) for value in values], ""
    except Unreadable as problem:
        return text or said, [], str(problem)


def with_ids(calls: Calls, turn: int) -> list[ToolCall]:
    """Give an id to each call: the model's own, since results refer to it, or one of the turn's."""
    ids = [call.id for call in calls]
    return [
        ToolCall(call.id if ids.count(call.id) == 1 and call.id else call_id(turn, index), call.name, call.arguments)
        for index, call in enumerate(calls)
    ]


def _call(value: Any, tools: Tools) -> ParsedCall:
    if isinstance(value, Unreadable):
        raise value
    if not isinstance(value, Mapping) or not isinstance(value.get("name"), str):
        raise Unreadable('A call is an object with "name" and "arguments".')
    arguments = value.get("arguments", value.get("parameters"))
    if arguments in (None, ""):  # what some write for a tool without parameters
        arguments = {}
    if isinstance(arguments, str):
        arguments = _loaded(arguments)
    if isinstance(arguments, Unreadable):
        raise arguments
    if not isinstance(arguments, Mapping):
        raise Unreadable(f"The arguments of {value['name']} are no object.")
    if value["name"] not in (names := _names(tools)):
        raise Unreadable(f"There is no tool {value['name']!r:.60}. There are: {', '.join(names)}.")
    id = str(value.get("id") or "")
    return ParsedCall(value["name"], dict(arguments), id if SHORT_ID.fullmatch(id) else "")


def _loaded(text: str) -> Any:
    try:
        return strict_json(text)
    except ValueError as error:
        return Unreadable(f"The call is no JSON: {error}.")


def strict_json(text: str) -> Any:
    """Parse JSON. Raises `ValueError` where Python's own reader is lenient: it takes NaN, and as many brackets as its
    stack holds, over which other readers then fail."""
    try:
        value = json.loads(text, strict=False, parse_constant=_number, parse_float=_number)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    level = [value]
    for _ in range(MAX_NESTING):
        inner = [one.values() if isinstance(one, dict) else one for one in level if isinstance(one, dict | list)]
        level = [one for values in inner for one in values]
    if level:
        raise ValueError("it is nested too deeply")
    return value


def _number(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is no number of JSON")
    return value


def _of_python(node: ast.expr, tools: Tools) -> dict[str, Any]:
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name)):
        raise Unreadable("a list of calls is due, such as [tool(argument=1)]")
    parameters = _properties(node.func.id, tools)
    if len(node.args) > len(parameters) and node.func.id in _names(tools):
        raise Unreadable(f"{node.func.id} takes {len(parameters)} argument(s), and got {len(node.args)}")
    arguments = {name: _literal(value) for name, value in zip(parameters, node.args, strict=False)}
    named = {str(keyword.arg): _literal(keyword.value) for keyword in node.keywords}
    return {"name": node.func.id, "arguments": strict_json(json.dumps(arguments | named))}


class _JsonNames(ast.NodeTransformer):
    """Reads true, false and null as JSON has them: templates write objects and lists as JSON."""

    values: Mapping[str, Any] = {"true": True, "false": False, "null": None}

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(self.values[node.id]) if node.id in self.values else node


def _literal(node: ast.expr) -> Any:
    return ast.literal_eval(_JsonNames().visit(node))


def _names(tools: Tools) -> list[str]:
    return [str(tool["function"]["name"]) for tool in tools]


def _properties(name: str, tools: Tools) -> Mapping[str, Any]:
    """Schemas of a tool's arguments. They come from clients: what is no schema has none."""
    found: Mapping[str, Any] = next((tool["function"] for tool in tools if tool["function"]["name"] == name), {})
    return _at(_at(found, "parameters"), "properties")


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
                arguments[argument[1]] = _typed(value, _types(_at(_properties(name, tools), argument[1])))
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
    """The reader of a format. `marks`: each shows that a call begins. `example`: what the model reads about a call that
    is not whole."""

    def read(text: str, tools: Tools) -> ParsedCalls:
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


def forced_call(tool_format: str, tools: Tools, name: str) -> Mapping[str, Any]:
    """The structure (`Sampling.structure`) of an answer that calls the tool of this name, or `ANY` of them. The
    arguments follow the tool's schema.

    `tool_format`: `environment.gateway.tools`. Raises `SamplingError` where there is no such tool, and for a format
    that no structure is known for.
    """
    functions = [tool["function"] for tool in tools]
    names = [function["name"] for function in functions]
    if name != ANY and name not in names:
        raise SamplingError(f"tool_choice={name}: there is no such tool{suggest(name, names)}", "tool_choice")
    if not functions:
        raise SamplingError("tool_choice: a call is asked for, and there are no tools.", "tool_choice")
    chosen = [function for function in functions if name in (ANY, function["name"])]
    if tool_format == "llama3_json":
        return {"json": _call_of(chosen, "parameters")}
    if tool_format == "hermes":
        content = {"type": "json_schema", "json_schema": _call_of(chosen, "arguments")}
        tag = {"type": "tag", "begin": "<tool_call>\n", "content": content, "end": "\n</tool_call>"}
        return {"structural_tag": json.dumps({"type": "structural_tag", "format": tag})}
    raise SamplingError(
        f"tool_choice: calls of the format {tool_format} cannot be forced, only those of hermes and llama3_json "
        '(environment.gateway.tools). Say "auto".', "tool_choice",
    )  # fmt: skip


def _call_of(functions: list[Mapping[str, Any]], arguments: str) -> dict[str, Any]:
    calls = [
        {
            "type": "object",
            "properties": {
                "name": {"const": function["name"]},
                arguments: dict(function.get("parameters") or NO_PARAMETERS),
            },
            "required": ["name", arguments],
            "additionalProperties": False,
        }
        for function in functions
    ]
    return calls[0] if len(calls) == 1 else {"anyOf": calls}

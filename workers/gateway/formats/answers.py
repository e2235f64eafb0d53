"""Answers of models, read from their text: thinking, what is said, and calls of tools in the ways in which models write
them. A function for each way takes a text and tools, and returns the rest of the text, calls, and a problem.

    thinking      <think>…</think>, [THINK]…[/THINK], and others of `MARKS`         before what is said

    hermes        <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>     Hermes, Qwen
    llama3_json   {"name": "add", "parameters": {"a": 1}}                           Llama 3, the whole answer
    mistral       [TOOL_CALLS][{"name": "add", "arguments": {"a": 1}, "id": "sV1hLtRz8"}]
                  [TOOL_CALLS]add[CALL_ID]sV1hLtRz8[ARGS]{"a": 1}                    newer ones; the id may be left out
    pythonic      [add(a=1), add(2)]                                                Llama 3.2 and 4, the whole answer

A call that cannot be read, or of a tool that is not there, is a problem in a sentence that the model can be told.
"""

import ast
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from penstock.workers.gateway.formats.conversation import SHORT_ID, Tools, call_id
from penstock.workers.trajectory import ToolCall

MARKS = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<|channel|>analysis<|message|>", "<|channel|>final<|message|>"),
    ("<|channel>thought", "<channel|>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("to=self<|message|>", "to=user<|message|>"),
)
"""Marks of thinking: of most models, of Mistral's, gpt-oss, Gemma 4, Cohere's and Muse Glimmer."""
BETWEEN = re.compile(r"<\|(?:end|eom)\|><\|start\|>assistant ?\Z")
"""Pattern of what stands between thinking and answer, where these are turns of their own."""
EMPTY = re.compile(r"<think>\s*</think>\n*")
"""Pattern of empty thinking, as templates write it."""
_HERMES = re.compile(r"<tool_call>\s*(.*?)\s*(?:</tool_call>|\Z)", re.DOTALL)
MISTRAL = "[TOOL_CALLS]"
_NAMED = re.compile(r"\s*([^\[\]{}\s]+)\s*(?:\[CALL_ID\]\s*([a-zA-Z0-9]*)\s*)?\[ARGS\](.*)\Z", re.DOTALL)
MAX_NESTING = 64
"""Deepest nesting of arguments. Deeper ones would exceed Python's stack when they are written again."""


def split_thinking(text: str, *, begun: bool = False) -> tuple[str | None, str]:
    """Split a text into thinking, and what is said after it. None: there is no thinking. `begun`: the prompt has begun
    the thinking, so that all is thinking if it was cut off before an end.

    >>> split_thinking("<think>2 + 2</think>4")
    ('2 + 2', '4')
    >>> split_thinking("<|channel|>analysis<|message|>2+2<|end|><|start|>assistant<|channel|>final<|message|>4")
    ('2+2', '4')
    >>> split_thinking("4")
    (None, '4')
    """
    for begin, end in MARKS:
        thinking, mark, said = text.partition(end)
        if mark:
            thinking = thinking.partition(begin)[2] if begin in thinking else thinking
            return BETWEEN.sub("", thinking).strip("\n"), said.lstrip("\n")
        if text.lstrip().startswith(begin):  # cut off while it thought
            return text.partition(begin)[2].strip("\n"), ""
    return (text.strip("\n"), "") if begun else (None, text)


def begins_thinking(prompt: str) -> bool:
    """Return whether a prompt ends where the model is to think."""
    return prompt.rstrip().endswith(tuple(begin for begin, _ in MARKS))


class Call(NamedTuple):
    name: str
    arguments: dict[str, Any]
    id: str = ""
    """Id that the model has given it; empty if it gave none that templates accept."""


Calls = list[Call]
Found = tuple[str, Calls, str]
"""The text without its calls, the calls, and why others could not be read."""
Reader = Callable[[str, Tools], Found]


class Unreadable(Exception):
    """The error for a call that cannot be read, with the text that the model gets."""


def hermes(text: str, tools: Tools) -> Found:
    return checked_calls(_HERMES.sub("", text).strip(), [_loaded(body) for body in _HERMES.findall(text)], tools, text)


def llama3_json(text: str, tools: Tools) -> Found:
    bare = text.removeprefix("<|python_tag|>").strip()
    if not bare.startswith("{"):
        return text, [], ""
    return checked_calls("", [_loaded(part) for part in bare.split(";\n")], tools, text)


def mistral(text: str, tools: Tools) -> Found:
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


def pythonic(text: str, tools: Tools) -> Found:
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


def none(text: str, tools: Tools) -> Found:
    return text, [], ""


def checked_calls(said: str, values: Sequence[Any], tools: Tools, text: str = "") -> Found:
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


def _call(value: Any, tools: Tools) -> Call:
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
    return Call(value["name"], dict(arguments), id if SHORT_ID.fullmatch(id) else "")


def _loaded(text: str) -> Any:
    try:
        return strict_json(text)
    except ValueError as error:
        return Unreadable(f"The call is no JSON: {error}.")


def strict_json(text: str) -> Any:
    """Parse JSON. Raises `ValueError` where Python's own reader is lenient: it takes NaN, and as many brackets as its
    stack holds, over which others then fail."""
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
    parameters = _parameters(node.func.id, tools)
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


def _parameters(name: str, tools: Tools) -> list[str]:
    for tool in tools:
        if tool["function"]["name"] == name:
            return list(tool["function"].get("parameters", {}).get("properties", {}))
    return []

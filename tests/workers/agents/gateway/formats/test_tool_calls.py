"""Tool calls as models write them."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.workers.agents.gateway.tool_calls import (
    MAX_NESTING,
    READERS,
    ParsedCall,
    hermes,
    llama3_json,
    mistral,
    pythonic,
    with_ids,
)
from tests.workers.agents.gateway.chat_models import ADD

TOOLS = [ADD]
BEGINNINGS = (
    "<tool_call>", "[TOOL_CALLS]", "[add(", "<function=add><parameter=", "<tool_call>add<arg_key>",
    '<atem:invoke name="add">', "<｜tool▁call▁begin｜>add<｜tool▁sep｜>", "<|tool_call>call:add{",
    "<|tool_call_start|>[", "to=functions.add<|message|>",
)  # fmt: skip
ENDS = (
    "</tool_call>", "]", ")]", "</parameter></function>", "</arg_value></tool_call>", "</atem:invoke>",
    "<｜tool▁call▁end｜>", "}<tool_call|>", "]<|tool_call_end|>", "<|call|>",
)  # fmt: skip
CALL = [ParsedCall("add", {"a": 1, "b": 2})]


def test_each_way_of_writing_a_call_is_read() -> None:
    body = '{"name": "add", "arguments": {"a": 1, "b": 2}}'
    assert hermes(f"So.\n<tool_call>\n{body}\n</tool_call>", TOOLS) == ("So.", CALL, "")
    assert hermes(f"<tool_call>{body}", TOOLS) == ("", CALL, "")  # cut off, but whole
    assert llama3_json('{"name": "add", "parameters": {"a": 1, "b": 2}}', TOOLS) == ("", CALL, "")
    assert llama3_json(f"<|python_tag|>{body};\n{body}", TOOLS) == ("", CALL * 2, "")
    assert mistral(f"So. [TOOL_CALLS][{body}]", TOOLS) == ("So.", CALL, "")
    assert mistral(f"[TOOL_CALLS]{body}", TOOLS) == ("", CALL, "")
    new = 'add[ARGS]{"a": 1, "b": 2}'
    assert mistral(f"So.[TOOL_CALLS]{new}[TOOL_CALLS]{new}", TOOLS) == ("So.", CALL * 2, "")
    assert pythonic("[add(a=1, b=2), add(1, b=2)]", TOOLS) == ("", CALL * 2, "")
    assert READERS["none"](body, TOOLS) == (body, [], "")


def test_a_call_keeps_the_id_that_the_model_gave_it() -> None:
    """What a tool returns is told by it."""
    old = '[TOOL_CALLS] [{"name": "add", "arguments": {}, "id": "sV1hLtRz8"}, {"name": "add", "id": "call_1"}]'
    new = "[TOOL_CALLS]add[CALL_ID]sV1hLtRz8[ARGS]{}[TOOL_CALLS]add[CALL_ID]1[ARGS]{}"
    for text in (old, new):
        calls = mistral(text, TOOLS)[1]
        assert [call.id for call in calls] == ["sV1hLtRz8", ""]
        assert [call.id for call in with_ids(calls, 3)] == ["sV1hLtRz8", "c00003001"]
    twice = [ParsedCall("add", {}, "sV1hLtRz8")] * 2
    assert [call.id for call in with_ids(twice, 0)] == ["c00000000", "c00000001"]


@pytest.mark.parametrize("arguments", ["null", '""', "{}", '"{}"'])
def test_no_arguments_are_none_at_all_however_they_are_written(arguments: str) -> None:
    call = f'{{"name": "add", "arguments": {arguments}}}'
    for text in (f"<tool_call>{call}</tool_call>", f"[TOOL_CALLS]{call}", '[TOOL_CALLS]{"name": "add"}'):
        assert READERS["hermes" if text[0] == "<" else "mistral"](text, TOOLS) == ("", [ParsedCall("add", {})], "")


def test_arguments_may_be_json_text() -> None:
    assert hermes('<tool_call>{"name": "add", "arguments": "{\\"a\\": 1, \\"b\\": 2}"}</tool_call>', TOOLS)[1] == CALL


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("text", ["Plain words.", "", "2 + 2 = 4", "[1, 2]", "a {b} c"])
def test_words_are_no_calls(reader: str, text: str) -> None:
    assert READERS[reader](text, TOOLS) == (text, [], "")


@pytest.mark.parametrize(
    ("reader", "text", "problem"),
    [
        ("hermes", "<tool_call>{a: 1}</tool_call>", "The call is no JSON"),
        ("hermes", "<tool_call>{}</tool_call>", 'A call is an object with "name" and "arguments".'),
        ("hermes", "<tool_call>[]</tool_call>", 'A call is an object with "name" and "arguments".'),
        ("hermes", '<tool_call>{"name": "sub"}</tool_call>', "There is no tool 'sub'. There are: add."),
        ("hermes", '<tool_call>{"name": "add", "arguments": [1]}</tool_call>', "The arguments of add are no object."),
        ("hermes", '<tool_call>{"name": "add", "arguments": "{"}</tool_call>', "The call is no JSON"),
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": NaN}}</tool_call>', "NaN is no number of JSON"),
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1e999}}</tool_call>', "1e999 is no number of JSON"),
        ("hermes", "<tool_call>" + "[" * 100_000, "nested too deeply"),
        ("hermes", "<tool_call>" + "[" * (MAX_NESTING + 1) + "]" * (MAX_NESTING + 1), "nested too deeply"),
        ("llama3_json", '{"name": "add", "parameters": 1}', "The arguments of add are no object."),
        ("mistral", "[TOOL_CALLS][{", "The call is no JSON"),
        ("mistral", "[TOOL_CALLS]" + "[" * 100_000, "nested too deeply"),
        ("mistral", "[TOOL_CALLS]add[ARGS]{", "The call is no JSON"),
        ("mistral", "[TOOL_CALLS]add{}[ARGS]", "A call is the tool's name, [ARGS], and an object"),
        ("mistral", "[TOOL_CALLS]sub[ARGS]{}", "There is no tool 'sub'"),
        ("pythonic", "[add(1, 2, 3)]", "add takes 2 argument(s), and got 3"),
        ("pythonic", "[add(a=b)]", "The call is no Python"),
        ("pythonic", "[add(a={[]})]", "The call is no Python"),
        ("pythonic", "[add(a={1})]", "The call is no Python"),
        ("pythonic", "[add(a=1e999)]", "The call is no Python"),
        ("pythonic", "[add(" + "(" * 50_000 + ")]", "The call is no Python"),
        ("pythonic", "[add(" + "-" * 50_000 + "1)]", "The call is no Python"),
        ("pythonic", "[sub(a=1)]", "There is no tool 'sub'"),
        ("qwen3_coder", "<tool_call>", "A call is not whole. It is written as <tool_call><function=NAME>"),
        ("qwen3_coder", '<tool_call>{"name": "add"}</tool_call>', "A call is not whole"),
        ("qwen3_coder", "<function=add><parameter=a>1</parameter>", "A call is not whole"),
        ("qwen3_coder", "<function=add><parameter=a>1</function>", "A call is not whole"),
        ("qwen3_coder", "<function=sub></function>", "There is no tool 'sub'"),
        ("glm45", "<tool_call>add<arg_key>a</arg_key><arg_value>1</arg_value>", "A call is not whole"),
        ("glm45", "<tool_call>add<arg_key>a</arg_key></tool_call>", "A call is not whole"),
        ("muse_glimmer", '<atem:invoke name="add">', "A call is not whole"),
        ("deepseek_v3", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n{", "A call is not whole"),
        ("deepseek_v3", "<｜tool▁call▁begin｜>add<｜tool▁sep｜>{<｜tool▁call▁end｜>", "The call is no JSON"),
        ("gemma4", "<|tool_call>call:add{a:1}", "A call is not whole"),
        ("gemma4", "<|tool_call>call:add{a:[1}<tool_call|>", "The arguments of add cannot be read"),
        ("gemma4", '<|tool_call>call:add{a:<|"|>1}<tool_call|>', "The arguments of add cannot be read"),
        ("lfm2", "<|tool_call_start|>[add(a=1)]", "A call is not whole"),
        ("lfm2", "<|tool_call_start|>[add(a=]<|tool_call_end|>", "The call is no Python"),
        ("openai", "<|channel|>commentary to=functions.add", "A call is not whole"),
        ("openai", "<|channel|>commentary to=functions.add<|message|>{<|call|>", "The call is no JSON"),
    ],
)
def test_what_cannot_be_read_stays_text_and_is_said_in_a_sentence(reader: str, text: str, problem: str) -> None:
    said, calls, found = READERS[reader](text, TOOLS)
    assert (said, calls) == (text, [])
    assert problem in found


def test_one_call_that_cannot_be_read_spoils_the_others() -> None:
    text = '<tool_call>{"name": "add"}</tool_call><tool_call>{</tool_call>'
    said, calls, problem = hermes(text, TOOLS)
    assert (said, calls) == (text, [])
    assert problem


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**6), 10**6) | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


@given(st.dictionaries(st.text(max_size=4), VALUES, max_size=3))
def test_arguments_come_back_as_they_were_written(arguments: dict[str, Any]) -> None:
    body = json.dumps({"name": "add", "arguments": arguments}, ensure_ascii=True)
    assert (
        hermes(f"<tool_call>\n{body}\n</tool_call>", TOOLS)[1] == [ParsedCall("add", arguments)] or "tool_call>" in body
    )
    assert mistral(f"[TOOL_CALLS][{body}]", TOOLS)[1] == [ParsedCall("add", arguments)]
    values = json.dumps(arguments)
    assert (
        mistral(f"[TOOL_CALLS]add[ARGS]{values}", TOOLS)[1] == [ParsedCall("add", arguments)]
        or "[TOOL_CALLS]" in values
    )


@given(st.text(alphabet='<>{}[]()",:=ad1 \n/tool_call', max_size=60))
def test_no_text_makes_a_reader_raise(text: str) -> None:
    for reader in READERS.values():
        for prefix, end in (*zip(BEGINNINGS, ENDS, strict=True), ("", ""), ("{", "")):
            reader(prefix + text, TOOLS)
            reader(prefix + text + end, TOOLS)


def test_the_time_of_reading_grows_no_faster_than_the_text_does_many_times() -> None:
    """A pattern that may match in many ways would take for ever."""
    argument = "<parameter=a>1</parameter>"
    for reader in READERS.values():
        for text in ("<function=add>" + argument * 2000, "<tool_call>add" + "<arg_key>a</arg_key><arg_value>" * 2000):
            assert reader(text, TOOLS)[1] == []


def test_other_ways_of_the_same_formats_are_read() -> None:
    coder = "<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\n2\n</parameter>\n</function>"
    assert READERS["qwen3_coder"](f"So.\n{coder}", TOOLS) == ("So.", CALL, "")  # some forget the outer mark
    newer = '<｜tool▁call▁begin｜>add<｜tool▁sep｜>{"a": 1, "b": 2}<｜tool▁call▁end｜>'
    assert READERS["deepseek_v3"](f"<｜tool▁calls▁begin｜>{newer}<｜tool▁calls▁end｜>", TOOLS) == ("", CALL, "")
    sampled = '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1, "b": 2}<|call|>'
    assert READERS["openai"](sampled, TOOLS) == ("", CALL, "")
    thought = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"
    assert READERS["openai"](thought + sampled, TOOLS) == ("<|channel|>analysis<|message|>hm", CALL, "")


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "string"}, "7", "7"),
        ({"type": ["string", "null"]}, "7", "7"),
        ({"type": ["string", "null"]}, "null", None),
        ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, "7", 7),
        ({"type": "integer"}, "seven", "seven"),
        ({"type": "boolean"}, "True", True),
        ({"type": "array"}, '["a", 1]', ["a", 1]),
        ({}, "7", 7),
        ({}, "a b", "a b"),
        ({"enum": ["x", "y"]}, "x", "x"),
        ({"type": 3, "anyOf": 4}, "7", 7),
    ],
)
def test_the_schema_tells_the_type_of_an_argument(schema: Any, text: str, value: Any) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": schema}}}}
    for body in (
        f"<function=f><parameter=a>\n{text}\n</parameter></function>",
        f"<tool_call>f<arg_key>a</arg_key><arg_value>{text}</arg_value></tool_call>",
        f'<atem:invoke name="f"><atem:parameter name="a">{text}</atem:parameter></atem:invoke>',
    ):
        found = [reader(body, [tool]) for reader in READERS.values()]
        assert [call.arguments for _, calls, _ in found for call in calls] == [{"a": value}]

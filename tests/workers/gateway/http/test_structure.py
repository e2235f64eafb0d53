"""Guided decoding, as each protocol asks for it, is one option of the sampler."""

from typing import Any

import pytest

from penstock.workers.gateway.http import chat, messages, responses
from penstock.workers.gateway.http.fields import Fields

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
NAMED = {"name": "x", "schema": SCHEMA}
USER = [{"role": "user", "content": "?"}]


@pytest.mark.parametrize(
    ("module", "body", "structure"),
    [
        (chat, {"response_format": {"type": "text"}}, None),
        (chat, {"response_format": {"type": "json_object"}}, {"json": {"type": "object"}}),
        (chat, {"response_format": {"type": "json_schema", "json_schema": NAMED}}, {"json": SCHEMA}),
        (chat, {"guided_regex": "a+"}, {"regex": "a+"}),
        (chat, {"guided_choice": ["a", "b"]}, {"choice": ["a", "b"]}),
        (chat, {"structured_outputs": {"grammar": "root ::= x"}}, {"grammar": "root ::= x"}),
        (responses, {"text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}}, {"json": SCHEMA}),
        (responses, {"text": {"format": {"type": "text"}, "verbosity": "low"}}, None),
        (messages, {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}, {"json": SCHEMA}),
        (messages, {"output_config": {"effort": "low"}}, None),
    ],
)  # fmt: skip
def test_structure_is_passed_on_only_if_it_was_asked_for(module: Any, body: dict, structure: Any) -> None:
    options = module.request_of(Fields({"messages": USER, "input": "?"} | body), {}).options
    assert options == ({"structure": structure} if structure else {})


ADD = {"name": "add", "parameters": SCHEMA}


@pytest.mark.parametrize(
    ("module", "tool", "choice", "must_call"),
    [
        (chat, {"type": "function", "function": ADD}, "required", "*"),
        (chat, {"type": "function", "function": ADD}, {"type": "function", "function": {"name": "add"}}, "add"),
        (chat, {"type": "function", "function": ADD}, "auto", None),
        (responses, {"type": "function", **ADD}, "required", "*"),
        (responses, {"type": "function", **ADD}, {"type": "function", "name": "add"}, "add"),
        (messages, {"name": "add", "input_schema": SCHEMA}, {"type": "any"}, "*"),
        (messages, {"name": "add", "input_schema": SCHEMA}, {"type": "tool", "name": "add"}, "add"),
        (messages, {"name": "add", "input_schema": SCHEMA}, {"type": "auto"}, None),
    ],
)
def test_a_call_is_forced_as_each_protocol_asks_for_it(module: Any, tool: dict, choice: Any, must_call: Any) -> None:
    body = {"messages": USER, "input": "?", "tools": [tool], "tool_choice": choice}
    asked = module.request_of(Fields(body), {})
    assert asked.options == ({"must_call": must_call} if must_call else {})
    assert len(asked.tools) == 1

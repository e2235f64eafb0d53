"""Guided decoding, as each protocol asks for it, is one option of the sampler."""

from typing import Any

import pytest

from penstock.workers.agents.gateway.client_protocols import CHAT, MESSAGES, RESPONSES
from penstock.workers.agents.gateway.client_requests import Fields

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
NAMED = {"name": "x", "schema": SCHEMA}
USER = [{"role": "user", "content": "?"}]


@pytest.mark.parametrize(
    ("protocol", "body", "structure"),
    [
        (CHAT, {"response_format": {"type": "text"}}, None),
        (CHAT, {"response_format": {"type": "json_object"}}, {"json": {"type": "object"}}),
        (CHAT, {"response_format": {"type": "json_schema", "json_schema": NAMED}}, {"json": SCHEMA}),
        (CHAT, {"guided_regex": "a+"}, {"regex": "a+"}),
        (CHAT, {"guided_choice": ["a", "b"]}, {"choice": ["a", "b"]}),
        (CHAT, {"structured_outputs": {"grammar": "root ::= x"}}, {"grammar": "root ::= x"}),
        (RESPONSES, {"text": {"format": {"type": "json_schema"} | NAMED}}, {"json": SCHEMA}),
        (RESPONSES, {"text": {"format": {"type": "text"}, "verbosity": "low"}}, None),
        (MESSAGES, {"output_config": {"format": {"type": "json_schema"} | NAMED}}, {"json": SCHEMA}),
        (MESSAGES, {"output_config": {"effort": "low"}}, None),
    ],
)  # fmt: skip
def test_structure_is_passed_on_only_if_it_was_asked_for(protocol: Any, body: dict, structure: Any) -> None:
    options = protocol.request_of(Fields({"messages": USER, "input": "?"} | body), {}).options
    assert options == ({"structure": structure} if structure else {})


ADD = {"name": "add", "parameters": SCHEMA}


@pytest.mark.parametrize(
    ("protocol", "tool", "choice", "must_call"),
    [
        (CHAT, {"type": "function", "function": ADD}, "required", "*"),
        (CHAT, {"type": "function", "function": ADD}, {"type": "function", "function": {"name": "add"}}, "add"),
        (CHAT, {"type": "function", "function": ADD}, "auto", None),
        (RESPONSES, {"type": "function", **ADD}, "required", "*"),
        (RESPONSES, {"type": "function", **ADD}, {"type": "function", "name": "add"}, "add"),
        (MESSAGES, {"name": "add", "input_schema": SCHEMA}, {"type": "any"}, "*"),
        (MESSAGES, {"name": "add", "input_schema": SCHEMA}, {"type": "tool", "name": "add"}, "add"),
        (MESSAGES, {"name": "add", "input_schema": SCHEMA}, {"type": "auto"}, None),
    ],
)
def test_a_call_is_forced_as_each_protocol_asks_for_it(protocol: Any, tool: dict, choice: Any, must_call: Any) -> None:
    body = {"messages": USER, "input": "?", "tools": [tool], "tool_choice": choice}
    asked = protocol.request_of(Fields(body), {})
    assert asked.options == ({"must_call": must_call} if must_call else {})
    assert len(asked.tools) == 1

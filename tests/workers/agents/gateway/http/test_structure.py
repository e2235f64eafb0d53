"""Guided decoding, as each protocol asks for it, is one option of the sampler."""

from typing import Any

import pytest

from penstock.workers.agents.gateway import anthropic_messages, openai_chat, openai_responses
from penstock.workers.agents.gateway.client_requests import Fields

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
NAMED = {"name": "x", "schema": SCHEMA}
USER = [{"role": "user", "content": "?"}]


@pytest.mark.parametrize(
    ("module", "body", "structure"),
    [
        (openai_chat, {"response_format": {"type": "text"}}, None),
        (openai_chat, {"response_format": {"type": "json_object"}}, {"json": {"type": "object"}}),
        (openai_chat, {"response_format": {"type": "json_schema", "json_schema": NAMED}}, {"json": SCHEMA}),
        (openai_chat, {"guided_regex": "a+"}, {"regex": "a+"}),
        (openai_chat, {"guided_choice": ["a", "b"]}, {"choice": ["a", "b"]}),
        (openai_chat, {"structured_outputs": {"grammar": "root ::= x"}}, {"grammar": "root ::= x"}),
        (openai_responses, {"text": {"format": {"type": "json_schema"} | NAMED}}, {"json": SCHEMA}),
        (openai_responses, {"text": {"format": {"type": "text"}, "verbosity": "low"}}, None),
        (anthropic_messages, {"output_config": {"format": {"type": "json_schema"} | NAMED}}, {"json": SCHEMA}),
        (anthropic_messages, {"output_config": {"effort": "low"}}, None),
    ],
)  # fmt: skip
def test_structure_is_passed_on_only_if_it_was_asked_for(module: Any, body: dict, structure: Any) -> None:
    options = module.request_of(Fields({"messages": USER, "input": "?"} | body), {}).options
    assert options == ({"structure": structure} if structure else {})


ADD = {"name": "add", "parameters": SCHEMA}


@pytest.mark.parametrize(
    ("module", "tool", "choice", "must_call"),
    [
        (openai_chat, {"type": "function", "function": ADD}, "required", "*"),
        (openai_chat, {"type": "function", "function": ADD}, {"type": "function", "function": {"name": "add"}}, "add"),
        (openai_chat, {"type": "function", "function": ADD}, "auto", None),
        (openai_responses, {"type": "function", **ADD}, "required", "*"),
        (openai_responses, {"type": "function", **ADD}, {"type": "function", "name": "add"}, "add"),
        (anthropic_messages, {"name": "add", "input_schema": SCHEMA}, {"type": "any"}, "*"),
        (anthropic_messages, {"name": "add", "input_schema": SCHEMA}, {"type": "tool", "name": "add"}, "add"),
        (anthropic_messages, {"name": "add", "input_schema": SCHEMA}, {"type": "auto"}, None),
    ],
)
def test_a_call_is_forced_as_each_protocol_asks_for_it(module: Any, tool: dict, choice: Any, must_call: Any) -> None:
    body = {"messages": USER, "input": "?", "tools": [tool], "tool_choice": choice}
    asked = module.request_of(Fields(body), {})
    assert asked.options == ({"must_call": must_call} if must_call else {})
    assert len(asked.tools) == 1

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

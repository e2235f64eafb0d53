"""Forced calls: what is asked of an engine, and what is refused by name."""

import json

import pytest

from penstock.conf.errors import SamplingError
from penstock.workers.agents.gateway.tool_calls import ANY, forced_call
from tests.workers.agents.gateway.chat_models import ADD

END = {"type": "function", "function": {"name": "end"}}


def test_a_call_of_hermes_is_a_tag_around_its_name_and_arguments() -> None:
    form = json.loads(forced_call("hermes", [ADD, END], ANY)["structural_tag"])["format"]
    assert (form["begin"], form["end"]) == ("<tool_call>\n", "\n</tool_call>")
    one, other = form["content"]["json_schema"]["anyOf"]
    assert one["properties"] == {"name": {"const": "add"}, "arguments": ADD["function"]["parameters"]}
    assert other["properties"]["arguments"] == {"type": "object", "properties": {}}


def test_a_call_by_its_name_is_of_that_tool_alone() -> None:
    schema = forced_call("llama3_json", [ADD, END], "end")["json"]
    assert schema["properties"]["name"] == {"const": "end"}
    assert schema["required"] == ["name", "parameters"]


@pytest.mark.parametrize(("tool_format", "tools", "name", "why"), [
    ("hermes", [], ANY, "there are no tools"),
    ("hermes", [ADD], "ad", r"there is no such tool.*add"),
    ("mistral", [ADD], ANY, r"calls of the format mistral cannot be forced.*environment\.gateway\.tools"),
    ("qwen3", [ADD], "add", "calls of the format qwen3 cannot be forced"),
])  # fmt: skip
def test_what_cannot_be_forced_is_refused_by_name(tool_format: str, tools: list, name: str, why: str) -> None:
    with pytest.raises(SamplingError, match=why):
        forced_call(tool_format, tools, name)

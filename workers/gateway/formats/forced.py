"""Forced calls: the structure of an answer that is one call of a tool, in the way in which the model writes calls
(`answers.py`). Tokens that would break it are left out of the distribution."""

import json
from collections.abc import Mapping
from typing import Any

from penstock.conf.errors import SamplingError, suggest
from penstock.workers.gateway.formats.conversation import Tools

ANY = "*"
"""Stands for the name of a tool: one of them has to be called, whichever."""
NO_PARAMETERS = {"type": "object", "properties": {}}


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

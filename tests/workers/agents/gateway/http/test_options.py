"""Options of requests: those that would change the answer are honoured or refused, and none is ignored in silence."""

import ast
import logging
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from anthropic.types.beta.message_create_params import MessageCreateParamsBase as BetaMessages
from anthropic.types.message_count_tokens_params import MessageCountTokensParams
from anthropic.types.message_create_params import MessageCreateParamsBase
from openai.types.chat.completion_create_params import CompletionCreateParamsBase
from openai.types.responses.response_create_params import ResponseCreateParamsBase

from penstock.workers.agents.gateway.client_protocols import (
    CHAT_OPTIONS,
    MESSAGES_OPTIONS,
    RESPONSES_OPTIONS,
    OptionTable,
)
from tests.workers.agents.gateway.chat_models import ADD, call_text, text_of
from tests.workers.agents.gateway.http.serving import USER, gateway, play

TOOL = {"name": "add", "description": "Adds.", "input_schema": ADD["function"]["parameters"]}


def options_of_vllm(file: str, name: str) -> set[str]:
    """Fields of a request of vLLM's own endpoint, read from its source: importing it takes seconds."""
    spec = find_spec("vllm")
    assert spec is not None
    path = Path((spec.submodule_search_locations or [""])[0]) / "entrypoints" / file / "protocol.py"
    (request,) = [node for node in ast.parse(path.read_text()).body if getattr(node, "name", "") == name]
    fields = [node.target.id for node in request.body if isinstance(node, ast.AnnAssign)]
    return {field for field in fields if not field.startswith("_")}


@pytest.mark.parametrize(
    ("table", "known"),
    [
        (CHAT_OPTIONS, {*CompletionCreateParamsBase.__annotations__}),
        (CHAT_OPTIONS, options_of_vllm("openai/chat_completion", "ChatCompletionRequest")),
        (RESPONSES_OPTIONS, {*ResponseCreateParamsBase.__annotations__}),
        (RESPONSES_OPTIONS, options_of_vllm("openai/responses", "ResponsesRequest")),
        (MESSAGES_OPTIONS, {*MessageCreateParamsBase.__annotations__, *MessageCountTokensParams.__annotations__}),
        (MESSAGES_OPTIONS, {*BetaMessages.__annotations__}),
        (MESSAGES_OPTIONS, options_of_vllm("anthropic", "AnthropicMessagesRequest")),
    ],
    ids=["chat", "chat of vLLM", "responses", "responses of vLLM", "messages", "beta messages", "messages of vLLM"],
)
def test_the_table_lists_what_clients_can_send(table: OptionTable, known: set[str]) -> None:
    assert known - (table.honoured | table.harmless | table.refused.keys() | table.without_effect) == set()


@pytest.mark.parametrize("table", [CHAT_OPTIONS, RESPONSES_OPTIONS, MESSAGES_OPTIONS])
def test_an_option_is_in_one_part_of_the_table(table: OptionTable) -> None:
    parts = [table.honoured, table.harmless, table.refused.keys(), table.without_effect]
    names = [name for part in parts for name in part]
    assert len(names) == len({*names})


def value_for(name: str) -> Any:
    """A value that would change the answer."""
    flags = {"skip_special_tokens", "spaces_between_special_tokens", "add_generation_prompt", "include_reasoning"}
    return False if name in flags else [7]


@pytest.mark.parametrize(
    ("path", "table", "name"),
    [(path, table, name)
     for path, table in (("/chat/completions", CHAT_OPTIONS), ("/responses", RESPONSES_OPTIONS))
     for name in table.refused],
)  # fmt: skip
def test_what_would_change_an_answer_is_refused_to_openais_client(path: str, table: OptionTable, name: str) -> None:
    async def scenario() -> None:
        async with gateway(["never"]) as open_gateway:
            body = {"model": "policy", "messages": [USER], "input": "?", name: value_for(name)}
            with pytest.raises(openai.BadRequestError) as error:
                await open_gateway.openai.post(path, cast_to=object, body=body)
            assert error.value.body["message"] == f"{name}: {table.refused[name].why}"
            assert error.value.param == name
            assert open_gateway.engines.prompts == []

    play(scenario())


@pytest.mark.parametrize("name", MESSAGES_OPTIONS.refused)
def test_what_would_change_an_answer_is_refused_to_anthropics_client(name: str) -> None:
    async def scenario() -> None:
        async with gateway(["never"]) as open_gateway:
            with pytest.raises(anthropic.BadRequestError) as error:
                await open_gateway.message(extra_body={name: value_for(name)})
            assert f"{name}: {MESSAGES_OPTIONS.refused[name].why}" in str(error.value)

    play(scenario())


def test_values_that_change_nothing_are_taken() -> None:
    async def scenario() -> None:
        async with gateway(["x"] * 2) as open_gateway:
            harmless = {
                name: refused.harmless[0] for name, refused in CHAT_OPTIONS.refused.items() if refused.harmless
            } | {"bad_words": [], "allowed_token_ids": None, "stop_token_ids": []}  # fmt: skip
            await open_gateway.chat(extra_body=harmless)
            await open_gateway.chat(seed=7, user="me", store=True, metadata={"a": "b"}, service_tier="auto")
            assert open_gateway.sampler.counts["ignored_options"] == 0

    play(scenario())


def test_an_option_without_effect_is_counted_and_told_once(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        async with gateway(["x"] * 4) as open_gateway:
            for _ in range(2):
                await open_gateway.chat(reasoning_effort="high", extra_body={"frobnicate": 1})
            await open_gateway.message(thinking={"type": "enabled", "budget_tokens": 1024}, max_tokens=2000)
            strict = {**ADD, "function": ADD["function"] | {"strict": True}}
            await open_gateway.chat(tools=[strict])
            assert open_gateway.sampler.counts["ignored_options"] == 6

    with caplog.at_level(logging.WARNING, logger="penstock"):
        play(scenario())
    told = [record.getMessage().split("'")[1] for record in caplog.records if "no effect" in record.getMessage()]
    assert told == ["reasoning_effort", "frobnicate", "thinking.budget_tokens", "tools.strict"]


def test_an_end_of_sequence_that_is_to_be_ignored_is_ignored() -> None:
    async def scenario() -> None:
        async with gateway(["x"] * 2) as open_gateway:
            await open_gateway.chat(extra_body={"ignore_eos": True}, max_tokens=5)
            await open_gateway.chat()
            assert [sampling.ignore_eos for sampling in open_gateway.engines.samplings] == [True, False]

    play(scenario())


TWO = call_text("add", '{"a": 1, "b": 2}') + call_text("add", '{"a": 3, "b": 4}')


def test_a_client_that_takes_one_call_gets_one() -> None:
    async def scenario() -> None:
        async with gateway([TWO] * 3 + ["3"]) as open_gateway:
            chat = await open_gateway.chat(tools=[ADD], parallel_tool_calls=False)
            assert len(chat.choices[0].message.tool_calls) == 1
            flat = {"type": "function", **ADD["function"]}
            responses = await open_gateway.respond(tools=[flat], parallel_tool_calls=False)
            assert [item.type for item in responses.output] == ["function_call"]
            choice = {"type": "auto", "disable_parallel_tool_use": True}
            message = await open_gateway.message(tools=[TOOL], tool_choice=choice)
            (block,) = message.content
            result = {"type": "tool_result", "tool_use_id": block.id, "content": "3"}
            said = {"role": "assistant", "content": message.content}
            await open_gateway.message(
                USER, said, {"role": "user", "content": [result]}, tools=[TOOL], tool_choice=choice
            )
            *_, one, two = open_gateway.sampler.turns
            assert two.parent == one.id
            assert text_of(one.output_ids).startswith(TWO)

    play(scenario())


def test_others_get_all_calls() -> None:
    async def scenario() -> None:
        async with gateway([TWO] * 2) as open_gateway:
            for more in ({}, {"parallel_tool_calls": True}):
                answer = await open_gateway.chat(tools=[ADD], **more)
                assert len(answer.choices[0].message.tool_calls) == 2

    play(scenario())


def test_an_error_of_a_tool_is_told_to_the_policy() -> None:
    async def scenario() -> None:
        async with gateway([call_text("add", "{}"), "so"]) as open_gateway:
            message = await open_gateway.message(tools=[TOOL])
            result = {"type": "tool_result", "tool_use_id": message.content[0].id, "content": "no a", "is_error": True}
            said = {"role": "assistant", "content": message.content}
            await open_gateway.message(USER, said, {"role": "user", "content": [result]}, tools=[TOOL])
            assert "<tool_response>Error: no a</tool_response>" in text_of(open_gateway.engines.prompts[1])

    play(scenario())


@pytest.mark.parametrize("prefill", [{"prefix": True}, {}])
def test_an_answer_that_the_client_has_begun_is_refused(prefill: dict[str, Any]) -> None:
    async def scenario() -> None:
        async with gateway(["never"]) as open_gateway:
            begun = {"role": "assistant", "content": "It is", **prefill}
            more = {} if prefill else {"continue_final_message": True, "add_generation_prompt": False}
            with pytest.raises(openai.BadRequestError, match="an answer cannot be begun for the policy"):
                await open_gateway.chat(USER, begun, extra_body=more)

    play(scenario())

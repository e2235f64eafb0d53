"""Conversations by the package `renderers`, with its own code for Qwen3."""

import asyncio

import pytest

from penstock.conf.environment import GatewayConfig
from penstock.conf.errors import ConfigError
from penstock.conf.model import FreshModelConfig
from penstock.workers.agents.gateway.chat_formats import RenderedFormat, TemplateFormat, make_format
from penstock.workers.agents.trajectory import segments_of
from penstock.workers.fresh_model import character_tokenizer
from tests.workers.agents.gateway.chat_models import (
    ADD,
    QWEN3,
    Saying,
    call_text,
    ids_of,
    make_sampler,
    text_of,
    tokenizer,
)

USER = {"role": "user", "content": "2 + 2?"}
CALL = "<think>\nadd\n</think>\n\n" + call_text("add", '{"a": 2, "b": 2}')


def qwen3() -> RenderedFormat:
    return RenderedFormat(tokenizer(), QWEN3)


def test_a_tool_cycle_goes_on_and_a_question_begins_anew_as_the_family_has_it() -> None:
    async def scenario() -> None:
        attempt = make_sampler(Saying([CALL, "<think>\nso\n</think>\n\n4", "5"]), QWEN3)
        first = await attempt.sample([USER], [ADD])
        assert (first.message["reasoning_content"], first.message["content"]) == ("add", "")
        assert [(call.name, call.arguments) for call in first.calls] == [("add", {"a": 2, "b": 2})]
        said = {"role": "assistant", "content": None, "tool_calls": first.message["tool_calls"]}
        result = {"role": "tool", "tool_call_id": first.calls[0].id, "content": "4"}
        second = await attempt.sample([USER, said, result], [ADD])
        third = await attempt.sample([USER, said, result, {"role": "assistant", "content": "4"}, USER], [ADD])
        assert [turn.parent for turn in attempt.turns] == [None, 0, None]
        read = len(first.prompt_ids) + len(first.output_ids)
        assert second.prompt_ids[:read] == [*first.prompt_ids, *first.output_ids]
        assert text_of(second.prompt_ids[read:]) == (
            "\n<|im_start|>user\n<tool_response>\n4\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
        )
        assert "so" not in text_of(third.prompt_ids).rpartition("4<|im_end|>")[0].rpartition("assistant")[2]
        assert len(segments_of(attempt.turns)) == 2

    asyncio.run(scenario())


def test_half_a_sign_that_a_harness_has_cut_is_no_error() -> None:
    cut = {"role": "user", "content": "cut \ud83d"}
    tool = {"type": "function", "function": {**ADD["function"], "description": "Adds \ud83d"}}

    async def scenario() -> None:
        attempt = make_sampler(Saying(["4", "5"]), QWEN3)
        first = await attempt.sample([cut], [tool])
        second = await attempt.sample([cut, first.message, {"role": "tool", "tool_call_id": "1", "content": "\ud83d"}])
        assert "cut ?" in text_of(first.prompt_ids)
        assert text_of(second.prompt_ids).count("?") == 2

    asyncio.run(scenario())


def test_an_answer_that_was_cut_short_is_closed_and_goes_on() -> None:
    async def scenario() -> None:
        attempt = make_sampler(Saying(["<think>so</think>abcd", "c"]), QWEN3)
        first = await attempt.sample([USER], max_tokens=6)
        assert (first.finish, first.message["content"]) == ("length", "ab")
        result = {"role": "tool", "tool_call_id": "1", "content": "4"}
        second = await attempt.sample([USER, first.message, result])
        read = len(first.prompt_ids) + len(first.output_ids)
        assert second.parent == first.id
        assert text_of(second.prompt_ids[read:]).startswith("<|im_end|>\n<|im_start|>user")

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("<tool_call>\n{a\n</tool_call>", "The call cannot be read (invalid json)."),
        ('<tool_call>\n{"name": "add"', "The call cannot be read (unclosed block)."),
        (call_text("sub", "{}"), "There is no tool 'sub'. There are: add."),
        (call_text("add", '{"a": NaN}'), "The arguments of add are no JSON: NaN is no number of JSON."),
        (call_text("add", "[" * 50_000), "nested too deeply"),
    ],
)
def test_a_call_that_cannot_be_read_is_text_and_a_sentence(text: str, problem: str) -> None:
    read = qwen3().read(ids_of(f"So. {text}<|im_end|>"), [ADD])
    assert list(read.calls) == []
    assert problem in read.problem
    assert read.message["content"] == f"So. {text}"


def test_without_tools_nothing_is_a_call() -> None:
    read = qwen3().read(ids_of(CALL), ())
    assert (read.calls, read.message["content"]) == ((), call_text("add", '{"a": 2, "b": 2}'))


def test_the_configuration_names_a_family_or_the_template() -> None:
    assert isinstance(make_format(tokenizer(), GatewayConfig()), TemplateFormat)
    assert isinstance(make_format(tokenizer(), GatewayConfig(format="qwen3")), RenderedFormat)
    with pytest.raises(ConfigError, match=r"environment\.gateway\.format=qwen33: .*'qwen3'.*The families are: .*glm-5"):
        make_format(tokenizer(), GatewayConfig(format="qwen33"))
    with pytest.raises(ConfigError, match="knows no family"):
        make_format(tokenizer(), GatewayConfig(format="auto"))
    with pytest.raises(ConfigError, match="the model's tokenizer is none of this family"):
        make_format(character_tokenizer(FreshModelConfig()), GatewayConfig(format="qwen3"))


def test_a_family_takes_its_templates_arguments_and_names_others() -> None:
    off = make_format(tokenizer(), GatewayConfig(format="qwen3"), {"enable_thinking": False})
    assert text_of(off.prompt_ids([USER], ())).endswith("assistant\n<think>\n\n</think>\n\n")
    with pytest.raises(
        ConfigError, match=r"model\.chat_template_kwargs\.enable_thinkin: .*did you mean 'enable_thinking'"
    ):
        make_format(tokenizer(), GatewayConfig(format="qwen3"), {"enable_thinkin": False})
    with pytest.raises(ConfigError, match=r"model\.chat_template_kwargs=\{'enable_thinking': 'sometimes'\}"):
        make_format(tokenizer(), GatewayConfig(format="qwen3"), {"enable_thinking": "sometimes"})

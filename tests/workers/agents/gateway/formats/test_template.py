"""Conversations by a chat template, without a sampled token made anew."""

from typing import Any

import pytest

from penstock.conf.errors import DataError, ModelError
from penstock.workers.agents.gateway.chat_formats import TemplateFormat
from penstock.workers.agents.trajectory import Turn
from tests.workers.agents.gateway.chat_models import ADD, TEMPLATES, call_text, chat_format, ids_of, text_of, tokenizer

USER = {"role": "user", "content": "a"}


def turn_of(template: str, text: str, messages: list[Any], tools: Any = ()) -> Turn:
    form = chat_format(template)
    ids = ids_of(text)
    read = form.read(ids, tools)
    prompt = form.prompt_ids(messages, tools)
    return Turn(0, None, read.message, read.calls, prompt, ids, [-1.0] * len(ids), [0] * len(ids), "stop")


@pytest.mark.parametrize("template", ["plain", "hermes", "strips", "opens"])
@pytest.mark.parametrize("ending", ["<|im_end|>", ""])
def test_what_follows_an_answer_is_what_the_template_writes_there(template: str, ending: str) -> None:
    form = chat_format(template)
    turn = turn_of(template, "one" + ending, [USER])
    following = form.next_prompt_ids(turn, [USER], [{"role": "user", "content": "b"}], ())
    assert following is not None
    whole = form.prompt_ids([USER, turn.message, {"role": "user", "content": "b"}], ())
    if template == "opens":  # the prompt has begun the thinking, which an answer without any does not show
        whole = ids_of(text_of(whole).replace("assistant\none", "assistant\n<think>\none"))
    assert following == whole


def test_an_answer_goes_on_whatever_it_was_sampled_as() -> None:
    form = chat_format()
    turn = turn_of("hermes", "<think>\n\n\nhm</think>" + call_text("add", '{"a" : 1}') + "<|im_end|>", [USER], [ADD])
    result = {"role": "tool", "content": "4", "tool_call_id": turn.calls[0].id}
    following = form.next_prompt_ids(turn, [USER], [result], [ADD])
    assert following is not None
    assert following[: len(turn.prompt_ids) + len(turn.output_ids)] == [*turn.prompt_ids, *turn.output_ids]


def test_a_template_that_rewrites_what_was_before_does_not_go_on() -> None:
    form = chat_format("strips")
    turn = turn_of("strips", "<think>\nhm\n</think>\n\none<|im_end|>", [USER])
    assert form.next_prompt_ids(turn, [USER], [{"role": "user", "content": "b"}], ()) is None
    assert form.next_prompt_ids(turn, [USER], [{"role": "tool", "content": "b"}], ()) is not None


def test_thinking_calls_and_text_are_read_apart() -> None:
    read = chat_format().read(ids_of("<think>\nhm\n</think>\n\nSo." + call_text("add", "{}") + "<|im_end|>"), [ADD])
    assert (read.message["reasoning_content"], read.message["content"]) == ("hm", "So.")
    assert [(call.name, call.arguments) for call in read.calls] == [("add", {})]
    assert read.message["tool_calls"][0]["function"] == {"name": "add", "arguments": {}}
    assert chat_format("opens").read(ids_of("hm\n</think>\n\nSo."), ()).message["reasoning_content"] == "hm"
    cut = chat_format().read(ids_of("<think>\nhm"), ())
    assert (cut.message["reasoning_content"], cut.message["content"]) == ("hm", "")


def test_thinking_that_the_prompt_has_begun_is_thinking_though_it_was_cut_off() -> None:
    form = chat_format("opens")
    read = form.read(ids_of("hm, let me"), (), form.prompt_ids([USER], ()))
    assert (read.message["reasoning_content"], read.message["content"]) == ("hm, let me", "")
    other = chat_format("hermes")
    assert other.read(ids_of("hm"), (), other.prompt_ids([USER], ())).message["content"] == "hm"


def test_without_tools_nothing_is_a_call() -> None:
    read = chat_format().read(ids_of(call_text("add", "{}")), ())
    assert (read.calls, read.message["content"]) == ((), call_text("add", "{}"))


def test_ids_of_calls_are_a_pure_function_of_the_attempt() -> None:
    form = chat_format()
    ids = ids_of(call_text("add", "{}") * 2)
    calls = [call.id for turn in (0, 1, -1) for call in form.read(ids, [ADD], turn=turn).calls]
    assert calls == ["c00000000", "c00000001", "c00001000", "c00001001", "a00001000", "a00001001"]
    assert [call.id for call in chat_format().read(ids, [ADD], turn=1).calls] == calls[2:4]


def test_a_conversation_that_the_template_does_not_take_is_the_askers_error() -> None:
    with pytest.raises(DataError, match="user and assistant take turns"):
        chat_format("strict").prompt_ids([USER, USER], ())


def test_half_a_sign_that_a_harness_has_cut_is_no_error() -> None:
    assert text_of(chat_format().prompt_ids([{"role": "user", "content": "cut \ud83d"}], ())) == (
        "<|im_start|>user\ncut ?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_model_that_cannot_chat_is_named() -> None:
    class Without:
        chat_template = None

    with pytest.raises(ModelError, match=r"chat_template\.jinja"):
        TemplateFormat(Without())

    class Deaf:
        chat_template = "x"

        def apply_chat_template(self, *arguments: Any, **more: Any) -> str:
            return "nothing"

    form = TemplateFormat(Deaf())
    with pytest.raises(ModelError, match="leaves out what the assistant says"):
        form.next_prompt_ids(turn_of("hermes", "x", [USER]), [USER], [USER], ())


def test_templates_of_the_tests_are_all_tried() -> None:
    assert {tokenizer(name).chat_template for name in TEMPLATES} == set(TEMPLATES.values())

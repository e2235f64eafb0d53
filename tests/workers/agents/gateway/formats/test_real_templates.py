"""Conversations by the chat templates of Qwen2.5, Qwen3, Llama 3 and Mistral: no sampled token is made anew."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from penstock.conf.errors import DataError
from penstock.workers.agents.gateway.chat_formats import TemplateFormat
from penstock.workers.agents.gateway.tool_calls import EMPTY
from penstock.workers.agents.gateway.turn_sampler import TurnSampler
from penstock.workers.agents.trajectory import segments_of
from tests.workers.agents.gateway.chat_models import ADD
from tests.workers.agents.gateway.formats.real_templates import FAMILIES, Family

SYSTEM, QUESTION = {"role": "system", "content": "Add."}, {"role": "user", "content": "2 + 2?"}
ARGUMENTS = '{"a": 2, "b": 2}'
TOOLS_MOVE = ("mistral v3", "mistral v3, sentencepiece", "mistral v7", "mistral v11")
"""Families whose templates write the tools before the last question, so that the next question begins a segment."""

SYSTEM_MOVES = ("mistral v3", "mistral v3, sentencepiece")
"""The same of the system prompt."""


def play(family: Family, texts: Sequence[str], tools: Sequence[Any] = (ADD,)) -> tuple[TurnSampler, list[Any]]:
    """Each answer without calls is asked another question; the last conversation."""

    async def scenario() -> tuple[TurnSampler, list[Any]]:
        sampler, messages = family.sampler(texts), [SYSTEM, QUESTION]
        for _ in texts:
            turn = await sampler.sample(messages, tools)
            results = [
                {"role": "tool", "tool_call_id": call.id, "name": call.name, "content": "4"} for call in turn.calls
            ]
            told = [{"role": "user", "content": turn.problem}] if turn.problem else [QUESTION]
            messages = [*messages, turn.message, *(results or told)]
        return sampler, messages

    return asyncio.run(scenario())


def game(family: Family) -> list[str]:
    call, answer = family.called(ARGUMENTS), family.said("It is 4.")
    return [call, call, answer, call, answer]


@pytest.mark.parametrize("name", FAMILIES)
def test_several_questions_with_calls_of_tools_go_on_token_by_token(name: str) -> None:
    family = FAMILIES[name]
    sampler, _ = play(family, game(family))
    turns = sampler.turns
    for turn in turns:
        if turn.parent is not None:
            before = [*turns[turn.parent].prompt_ids, *turns[turn.parent].output_ids]
            assert turn.prompt_ids[: len(before)] == before
    begins_anew = name == "qwen3" or name in TOOLS_MOVE  # what was thought before a question, and the tools
    assert [turn.parent for turn in turns] == [None, 0, 1, None if begins_anew else 2, 3]
    assert len(segments_of(turns)) == 1 + begins_anew
    assert [len(turn.calls) for turn in turns] == [1, 1, 0, 1, 0]
    assert {call.arguments["b"] for turn in turns for call in turn.calls} == {2}
    assert turns[2].answer == family.space + "It is 4."
    thought = "hm" if "hm" in family.thought else "" if family.thought else None
    assert turns[2].message.get("reasoning_content") == thought


@pytest.mark.parametrize("name", FAMILIES)
def test_what_is_put_between_turns_is_what_the_template_writes_there(name: str) -> None:
    family = FAMILIES[name]
    sampler, messages = play(family, game(family))
    following = family.form.next_prompt_ids(sampler.turns[-1], messages[:-2], [QUESTION], [ADD])
    if following is None:
        assert name == "qwen3" or name in TOOLS_MOVE
        following = sampler.turns[-1].prompt_ids
        messages = messages[:-2]
    whole = family.form.prompt_ids(messages, [ADD])
    assert EMPTY.sub("", family.text(following)) == EMPTY.sub("", family.text(whole))


@pytest.mark.parametrize("name", FAMILIES)
def test_without_tools_a_conversation_goes_on_unless_the_template_rewrites_it(name: str) -> None:
    family = FAMILIES[name]
    sampler, _ = play(family, [family.said("It is 4.")] * 3, ())
    begins_anew = name == "qwen3" or name in SYSTEM_MOVES
    assert [turn.parent for turn in sampler.turns] == ([None] * 3 if begins_anew else [None, 0, 1])


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("tools", [(), (ADD,)])
def test_an_answer_that_begins_with_line_ends_goes_on_like_others(name: str, tools: Sequence[Any]) -> None:
    """Qwen3 strips them in the last answer alone."""
    family = FAMILIES[name]
    call = [family.called(ARGUMENTS)] if tools else []
    plain, odd = (play(family, [*call, family.said(text), *call, text], tools)[0] for text in ("4.", "\n\n4."))
    assert [turn.parent for turn in odd.turns] == [turn.parent for turn in plain.turns]


@pytest.mark.parametrize("name", FAMILIES)
def test_prompts_are_the_same_when_an_attempt_is_played_again(name: str) -> None:
    family = FAMILIES[name]
    once, again = (play(family, game(family))[0].turns for _ in range(2))
    assert [turn.prompt_ids for turn in once] == [turn.prompt_ids for turn in again]


@pytest.mark.parametrize("name", FAMILIES)
def test_several_calls_at_once_are_made_or_the_model_is_told_to_make_one(name: str) -> None:
    family = FAMILIES[name]
    sampler, _ = play(family, [family.thought + two_calls(family), family.said("It is 4.")])
    first, second = sampler.turns
    assert second.parent == first.id
    if name.startswith("llama"):
        assert (list(first.calls), first.problem) == ([], "Make one call at a time.")
        assert "Make one call at a time." in family.text(second.prompt_ids)
    else:
        assert [call.id for call in first.calls] == [
            "c00000000",
            "c00000001",
        ]  # ids that are twice the same tell nothing
        assert family.text(second.prompt_ids).count("4") >= 2


def two_calls(family: Family) -> str:
    one = family.call("add", ARGUMENTS)
    if one.endswith("]"):  # Mistral's list
        return f"{one[:-1]}, {one[one.index('{') : -1]}]"
    return {"hermes": "\n", "llama3_json": ";\n"}.get(family.tools, "").join([one, one])


@pytest.mark.parametrize("name", [name for name in FAMILIES if name.startswith("mistral")])
def test_words_beside_a_call_and_ids_of_other_clients_end_no_attempt(name: str) -> None:
    family = FAMILIES[name]
    sampler, _ = play(family, ["So." + family.call("add", ARGUMENTS), family.said("It is 4."), family.said("It is 4.")])
    assert sampler.turns[0].answer == "So."
    assert sampler.turns[1].parent == 0
    call = {"id": "call_abc", "type": "function", "function": {"name": "add", "arguments": {"a": 2}}}
    said = {"role": "assistant", "content": "", "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": "call_abc", "name": "add", "content": "4"}
    text = family.text(family.form.prompt_ids([QUESTION, said, result], [ADD]))
    assert "call_abc" not in text
    assert text.count("x00000000") == (2 if "13" not in name else 0)


def test_llamas_other_ending_of_a_call_is_no_part_of_it() -> None:
    family = FAMILIES["llama3.1"]
    sampler, _ = play(family, [family.call("add", ARGUMENTS) + "<|eom_id|>", "4"])
    first, second = sampler.turns
    assert [call.arguments for call in first.calls] == [{"a": 2, "b": 2}]
    rest = family.text(second.prompt_ids[len(first.prompt_ids) + len(first.output_ids) :])
    assert rest.startswith("<|start_header_id|>ipython<|end_header_id|>")


def test_what_the_configuration_tells_the_template_is_in_the_prompt() -> None:
    off = FAMILIES["qwen3, thinking off"]
    assert off.text(off.form.prompt_ids([QUESTION], ())).endswith("assistant\n<think>\n\n</think>\n\n")
    llama = FAMILIES["llama3.2"]
    assert "Today Date: 26 Jul 2024" in llama.text(llama.form.prompt_ids([QUESTION], ()))


def test_a_conversation_that_a_real_template_does_not_take_is_the_askers_error() -> None:
    form = FAMILIES["mistral v3"].form
    with pytest.raises(DataError, match="does not take this conversation"):
        form.prompt_ids([QUESTION, {"role": "critic", "content": "No."}], ())


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("tools", [(), (ADD,)])
def test_an_answer_of_nothing_ends_no_attempt(name: str, tools: Sequence[Any]) -> None:
    family = FAMILIES[name]
    sampler, messages = play(family, ["", family.said("It is 4."), ""], tools)
    assert [turn.answer for turn in sampler.turns] == ["", family.space + "It is 4.", ""]
    put_between = []
    for turn in sampler.turns:
        if turn.parent is not None:
            before = sampler.turns[turn.parent]
            so_far = [*before.prompt_ids, *before.output_ids]
            assert turn.prompt_ids[: len(so_far)] == so_far
            put_between.append(family.text(turn.prompt_ids[len(so_far) :]))
    assert len({*put_between}) <= 1  # the same after something and after nothing
    assert all("2 + 2?" in text for text in put_between)
    if name.startswith("mistral"):
        begins_anew = name in (TOOLS_MOVE if tools else SYSTEM_MOVES)
        assert [turn.parent for turn in sampler.turns] == ([None] * 3 if begins_anew else [None, 0, 1])
    assert family.form.prompt_ids(messages, tools)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_reader_of_calls_is_found_by_the_template(name: str) -> None:
    family = FAMILIES[name]
    form = TemplateFormat(family.tokenizer, template_kwargs=family.kwargs)
    assert (form.tool_format, form.refusal) == (family.tools, "")
    assert form.describe_tools() == f"calls are read as {family.tools}"

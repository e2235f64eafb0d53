"""Tools by the chat templates of TRL's package: calls that a template writes are read back, and what it leaves out is
told."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from penstock.conf.environment import TOOL_FORMATS, GatewayConfig
from penstock.conf.errors import ConfigError, DataError
from penstock.workers.gateway.formats.conversation import tool_call
from penstock.workers.gateway.formats.readers import READERS
from penstock.workers.gateway.formats.rendered import make_format
from penstock.workers.gateway.formats.template import TemplateFormat
from penstock.workers.gateway.formats.tool_support import NAME, TOOL, tool_support
from penstock.workers.trajectory import Turn
from tests.workers.gateway.formats.real_templates import TRL_TEMPLATES, trl_tokenizer

READ = {
    "deepseekv3": "deepseek_v3", "diffusion_gemma": "gemma4", "gemma4": "gemma4", "glm4moe": "glm45",
    "gptoss": "openai", "lfm2_2_5": "lfm2", "lfm2_v2": "lfm2", "llama3_1": "llama3_json", "llama3_2": "llama3_json",
    "muse_glimmer": "muse_glimmer", "nemotron_3": "qwen3_coder", "qwen2_5": "hermes", "qwen2_5_vl": "",
    "qwen3": "hermes", "qwen3_5": "qwen3_coder", "qwen3_6": "qwen3_coder", "qwen3_8": "qwen3_coder",
}  # fmt: skip
"""Readers by the beginnings of templates' names; the longest counts. All others write no calls."""
NO_CALLS = ("cohere", "deepseek_r1", "gemma", "idefics3", "lfm2", "llama3", "llava", "phi3", "qwen2_5_vl", "smolvlm")
QUESTION = {"role": "user", "content": "What is it?"}
VALUES = {
    "word": "two\nlines, <b>marked</b>, \"quoted\", it's {1: [2]}", "count": 41, "is_exact": True, "share": 0.5,
    "parts": ["a", 1, None], "options": {"x": 1.5, "deep": {"y": "b"}}, "empty": "", "digits": "007", "nothing": None,
}  # fmt: skip
TYPES = {
    "word": "string", "count": "integer", "is_exact": "boolean", "share": "number", "parts": "array",
    "options": "object", "empty": "string", "digits": "string", "nothing": ["string", "null"],
}  # fmt: skip
RICH_TOOL = {"type": "function", "function": {
    "name": NAME, "description": "Looks a word up.",
    "parameters": {"type": "object", "properties": {name: {"type": kind} for name, kind in TYPES.items()}},
}}  # fmt: skip
SEEING = ("idefics3", "llava_next", "smolvlm")
"""Templates that take nothing but lists of parts."""
REWRITING = ("gptoss", "nemotron_3", "qwen3_5_think", "qwen3_6")
"""Templates that write an earlier answer in another way when a question follows."""
UNESCAPED = ("lfm2_2_5", "lfm2_2_5_v2")
"""Templates that write texts with line ends and quotes so that nobody can read them."""


def reader_of(name: str) -> str:
    known = [begin for begin in (*READ, *NO_CALLS) if name.startswith(begin)]
    return READ.get(max(known, key=len), "")


def with_tools() -> list[str]:
    return [name for name in TRL_TEMPLATES if reader_of(name)]


def form_of(name: str) -> TemplateFormat:
    return TemplateFormat(trl_tokenizer(name))


def answer_of(form: TemplateFormat, *arguments: Mapping[str, Any], tool: Any = TOOL) -> str:
    """Calls as the template writes them, without what ends the answer."""
    calls = [tool_call(f"c0000000{index}", NAME, one) for index, one in enumerate(arguments)]
    support, message = form.tool_support, {"role": "assistant", "content": "", "tool_calls": calls}
    text = form._text([QUESTION, message], [tool])
    written = text[text.index(support.call[: support.call.index(NAME)], text.index(str(QUESTION["content"]))) :]
    return written.removesuffix(form._ending_after(message))


def ids(form: TemplateFormat, text: str) -> list[int]:
    return form._encode(text)


def test_a_template_of_every_kind_is_tried() -> None:
    assert len(TRL_TEMPLATES) >= 60
    assert {reader_of(name) for name in TRL_TEMPLATES} == {*READERS} - {"mistral", "pythonic", "none"} | {""}


def test_readers_are_those_that_the_configuration_names() -> None:
    assert ("auto", *READERS) == TOOL_FORMATS


@pytest.mark.parametrize("name", TRL_TEMPLATES)
def test_the_reader_is_the_one_that_reads_what_the_template_writes(name: str) -> None:
    form = form_of(name)
    assert form.tool_support.reader == reader_of(name)
    if not reader_of(name):
        assert "their calls" in form.tool_support.left_out
        assert not form.tool_support.call


@pytest.mark.parametrize("name", TRL_TEMPLATES)
def test_models_that_see_have_the_same_reader(name: str) -> None:
    """Templates of models of text may take no lists of parts; they are never given some."""
    support = TemplateFormat(trl_tokenizer(name), in_parts=True).tool_support
    sees = name.startswith(("gemma4", "diffusion", "lfm2_2_5", "muse", "qwen3_5", "qwen3_6", "qwen3_8", "qwen3_vl"))
    assert support.reader == reader_of(name) if sees else support.reader in ("", reader_of(name))


@pytest.mark.parametrize("name", with_tools())
def test_arguments_of_all_types_come_back_as_they_were(name: str) -> None:
    form = form_of(name)
    answer = form.read(ids(form, answer_of(form, VALUES, tool=RICH_TOOL)), [RICH_TOOL])
    if name in UNESCAPED:
        assert answer.problem.startswith("The call is no Python")
        return
    assert answer.problem == ""
    assert [(call.name, call.arguments) for call in answer.calls] == [(NAME, VALUES)]
    assert answer.message["content"] == ""


@pytest.mark.parametrize("name", with_tools())
def test_a_call_without_arguments_is_read(name: str) -> None:
    form = form_of(name)
    answer = form.read(ids(form, answer_of(form, {})), [TOOL])
    assert [(call.name, call.arguments) for call in answer.calls] == [(NAME, {})]


def turn_of(form: TemplateFormat, number: int, prompt: list[int], said: str, ending: int) -> Turn:
    begun = text_of(form, prompt).rstrip().endswith("<think>") and "</think>" not in said
    sampled = [*ids(form, ("hm\n</think>\n\n" if begun else "") + said), ending]
    read = form.read(sampled, [TOOL], prompt, number)
    nothing = [0.0] * len(sampled)
    return Turn(number, None, read.message, read.calls, prompt, sampled, nothing, [0] * len(sampled), "stop")


def text_of(form: TemplateFormat, token_ids: Sequence[int]) -> str:
    return str(form._tokenizer.decode(token_ids))


@pytest.mark.parametrize("name", with_tools())
def test_a_call_its_result_and_another_question_follow_the_sampled_tokens(name: str) -> None:
    form = form_of(name)
    said = answer_of(form, {"word": "quokka", "count": 41})
    ending = (form._call_ending_ids or form._ending_ids)[0]
    one = turn_of(form, 0, form.prompt_ids([QUESTION], [TOOL]), said, ending)
    assert [(call.name, call.arguments) for call in one.calls] == [(NAME, {"word": "quokka", "count": 41})]
    result = {"role": "tool", "tool_call_id": one.calls[0].id, "name": NAME, "content": "a marsupial"}
    so_far: list[Any] = [QUESTION, one.message, result]
    prompt = form.next_prompt_ids(one, [QUESTION], [result], [TOOL])
    assert prompt is not None
    assert added(form, one, prompt).count("a marsupial") == 1
    assert text_of(form, form.prompt_ids(so_far, [TOOL])).endswith(added(form, one, prompt))

    two = turn_of(form, 1, prompt, "So it is.", form._ending_ids[0])
    assert (two.message["content"], list(two.calls)) == ("So it is.", [])
    last = form.next_prompt_ids(two, so_far, [QUESTION], [TOOL])
    whole = text_of(form, form.prompt_ids([*so_far, two.message, QUESTION], [TOOL]))
    assert "So it is." in whole
    if last is None:
        assert name.startswith(REWRITING)
    else:
        assert whole.endswith(added(form, two, last))


def added(form: TemplateFormat, turn: Turn, prompt: Sequence[int]) -> str:
    """What stands in a prompt behind the tokens of a turn, which it begins with."""
    before = [*turn.prompt_ids, *turn.output_ids]
    assert list(prompt[: len(before)]) == before
    return text_of(form, prompt[len(before) :])


@pytest.mark.parametrize("name", with_tools())
def test_several_calls_at_once_are_read_where_the_template_writes_several(name: str) -> None:
    form = form_of(name)
    calls = [{"word": word, "count": 41} for word in ("quokka", "numbat")]
    if form.tool_support.takes_several:
        answer = form.read(ids(form, answer_of(form, *calls)), [TOOL])
        assert [call.arguments for call in answer.calls] == calls
        assert answer.message["content"] == ""
    else:
        assert name.startswith(("gptoss", "llama3"))
        between = "" if name.startswith("gptoss") else ";\n"
        answer = form.read(ids(form, between.join(answer_of(form, one) for one in calls)), [TOOL])
        assert (list(answer.calls), answer.problem) == ([], "Make one call at a time.")


@pytest.mark.parametrize(
    ("name", "tools"), [*((name, ()) for name in TRL_TEMPLATES), *((name, (TOOL,)) for name in with_tools())]
)
def test_the_mark_behind_an_answer_is_no_part_of_it(name: str, tools: Sequence[Any]) -> None:
    form = TemplateFormat(trl_tokenizer(name), in_parts=name.startswith(SEEING))
    for ending in form._ending_ids[:1]:
        answer = form.read([*ids(form, "It is a marsupial."), ending], tools)
        assert answer.message["content"] == "It is a marsupial."


@pytest.mark.parametrize("name", [name for name in TRL_TEMPLATES if not reader_of(name)])
def test_tools_are_refused_where_the_template_leaves_out_their_calls(name: str) -> None:
    form = form_of(name)
    assert form.prompt_ids([QUESTION], ()) or name.startswith(SEEING)
    with pytest.raises(DataError, match=r"environment\.gateway\.tools=auto: .* leaves out .*their calls"):
        form.prompt_ids([QUESTION], [TOOL])
    assert "an environment that offers tools is refused" in form.describe_tools()


@pytest.mark.parametrize("name", with_tools())
def test_a_reader_that_reads_none_of_the_templates_calls_is_an_error_at_the_start(name: str) -> None:
    fitting = reader_of(name)
    other = "mistral" if fitting == "hermes" else "hermes"
    with pytest.raises(ConfigError, match=rf"environment\.gateway\.tools={other}: .* as {fitting},.* Say auto\."):
        make_format(trl_tokenizer(name), GatewayConfig(tools=other))
    assert make_format(trl_tokenizer(name), GatewayConfig(tools=fitting)).describe_tools() == (
        form_of(name).describe_tools()
    )


@pytest.mark.parametrize("name", ["lfm2", "phi3_5", "qwen2_5_vl"])
def test_a_reader_that_is_named_is_taken_and_what_is_left_out_is_told(name: str) -> None:
    form = make_format(trl_tokenizer(name), GatewayConfig(tools="hermes"))
    assert form.prompt_ids([QUESTION], [TOOL])
    assert "calls are read as hermes; the model's chat template leaves out" in form.describe_tools()


def test_a_template_that_wants_arguments_as_text_gets_text() -> None:
    form = form_of("deepseekv3")
    assert form.tool_support.arguments_as_text
    assert json.dumps({"word": "quokka"}) in answer_of(form, {"word": "quokka"})
    assert form.describe_tools() == (
        "calls are read as deepseek_v3; the model's chat template leaves out the tools, so write them into messages"
    )


def test_a_template_that_takes_nothing_at_all_leaves_everything_out() -> None:
    def refuse(*arguments: Any, **more: Any) -> str:
        raise DataError("no")

    assert tool_support(refuse).left_out == ("the tools", "their calls", "their results")

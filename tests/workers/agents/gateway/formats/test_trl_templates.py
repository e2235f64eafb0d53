"""Tools by the chat templates of TRL's package: calls that a template writes are read back, and what it leaves out is
told."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from penstock.conf.environment import TOOL_FORMATS, GatewayConfig
from penstock.conf.errors import ConfigError, DataError
from penstock.workers.agents.gateway.chat_formats import NAME, TOOL, TemplateFormat, make_format, tool_support
from penstock.workers.agents.gateway.conversation import tool_call
from penstock.workers.agents.gateway.tool_calls import READERS
from penstock.workers.agents.trajectory import Turn
from tests.workers.agents.gateway.formats.real_templates import TRL_TEMPLATES, trl_tokenizer

READ = {
    "deepseekv3": "deepseek_v3", "diffusion_gemma": "gemma4", "gemma4": "gemma4", "glm4moe": "glm45",
    "gptoss": "openai", "lfm2_2_5": "lfm2", "lfm2_v2": "lfm2", "llama3_1": "llama3_json", "llama3_2": "llama3_json",
    "muse_glimmer": "muse_glimmer", "nemotron_3": "qwen3_coder", "qwen2_5": "hermes", "qwen2_5_vl": "",
    "qwen3": "hermes", "qwen3_5": "qwen3_coder", "qwen3_6": "qwen3_coder", "qwen3_8": "qwen3_coder",
}  # fmt: skip
"""Readers by the beginnings of templates' names; the longest counts. All others write no calls."""
NO_CALLS = ("cohere", "deepseek_r1", "gemma", "idefics3", "lfm2", "llama3", "llava", "phi3", "qwen2_5_vl", "smolvlm")
QUESTION, SAID = {"role": "user", "content": "What is it?"}, "It is a marsupial."
USUAL = {"word": "quokka", "count": 41}
RESULT = {"role": "tool", "tool_call_id": "c00000000", "name": NAME, "content": "found a marsupial"}
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


@dataclass(frozen=True)
class Chat:
    """A template with a tokenizer."""

    tokenizer: Any
    form: TemplateFormat

    def ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def text(self, token_ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(token_ids))

    def prompt(self, *messages: Any, tool: Any = TOOL) -> str:
        return self.text(self.form.prompt_ids(messages, [tool]))

    def calls(self, *arguments: Mapping[str, Any], tool: Any = TOOL) -> str:
        """Calls as the template writes them, without what ends the answer."""
        begin = self.usual[: self.usual.index(NAME)]
        asked = self.prompt(QUESTION, called(USUAL))
        behind = asked[asked.index(self.usual) + len(self.usual) :]
        written = self.prompt(QUESTION, called(*arguments), tool=tool)
        return written[written.index(begin, written.index(QUESTION["content"])) :].removesuffix(behind)

    @property
    def usual(self) -> str:
        """The call by which the template was looked at, without what ends the answer."""
        call, ending = self.form.tool_support.call, self.form.tool_support.ending
        return call[: call.rindex("}") + 1] if ending is None else call[: len(call) - len(ending)]

    @property
    def call_ending(self) -> int:
        """Token behind a call."""
        _, _, behind = self.prompt(QUESTION, called(USUAL), RESULT).partition(self.usual[self.usual.index(NAME) :])
        return self.ids(behind)[0]

    def ending(self, *, in_parts: bool = False) -> int:
        """Token behind another answer."""
        told = [QUESTION, {"role": "assistant", "content": SAID}, QUESTION]
        if in_parts:
            told = [{**message, "content": [{"type": "text", "text": message["content"]}]} for message in told]
        texts = (self.tokenizer.apply_chat_template(told[:number], tokenize=False) for number in (2, 3))
        return next(self.ids(behind)[0] for text in texts if (behind := text.rpartition(SAID)[2]))


def called(*arguments: Mapping[str, Any]) -> dict[str, Any]:
    calls = [tool_call(f"c0000000{index}", NAME, one) for index, one in enumerate(arguments)]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def chat_of(name: str, *, in_parts: bool = False) -> Chat:
    tokenizer = trl_tokenizer(name)
    return Chat(tokenizer, TemplateFormat(tokenizer, in_parts=in_parts))


def test_a_template_of_every_kind_is_tried() -> None:
    assert len(TRL_TEMPLATES) >= 60
    assert {reader_of(name) for name in TRL_TEMPLATES} == {*READERS} - {"mistral", "pythonic", "none"} | {""}


def test_readers_are_those_that_the_configuration_names() -> None:
    assert ("auto", *READERS) == TOOL_FORMATS


@pytest.mark.parametrize("name", TRL_TEMPLATES)
def test_the_reader_is_the_one_that_reads_what_the_template_writes(name: str) -> None:
    form = chat_of(name).form
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
    chat = chat_of(name)
    answer = chat.form.read(chat.ids(chat.calls(VALUES, tool=RICH_TOOL)), [RICH_TOOL])
    if name in UNESCAPED:
        assert answer.problem.startswith("The call is no Python")
        return
    assert answer.problem == ""
    assert [(call.name, call.arguments) for call in answer.calls] == [(NAME, VALUES)]
    assert answer.message["content"] == ""


@pytest.mark.parametrize("name", with_tools())
def test_a_call_without_arguments_is_read(name: str) -> None:
    chat = chat_of(name)
    answer = chat.form.read(chat.ids(chat.calls({})), [TOOL])
    assert [(call.name, call.arguments) for call in answer.calls] == [(NAME, {})]


def turn_of(chat: Chat, number: int, prompt: list[int], said: str, ending: int) -> Turn:
    begun = chat.text(prompt).rstrip().endswith("<think>") and "</think>" not in said
    sampled = [*chat.ids(("hm\n</think>\n\n" if begun else "") + said), ending]
    read = chat.form.read(sampled, [TOOL], prompt, number)
    nothing = [0.0] * len(sampled)
    return Turn(number, None, read.message, read.calls, prompt, sampled, nothing, [0] * len(sampled), "stop")


@pytest.mark.parametrize("name", with_tools())
def test_a_result_and_a_question_follow_the_sampled_tokens(name: str) -> None:
    chat = chat_of(name)
    one = turn_of(chat, 0, chat.form.prompt_ids([QUESTION], [TOOL]), chat.calls(USUAL), chat.call_ending)
    assert [(call.name, call.arguments) for call in one.calls] == [(NAME, USUAL)]
    result = {**RESULT, "tool_call_id": one.calls[0].id}
    prompt = chat.form.next_prompt_ids(one, [QUESTION], [result], [TOOL])
    assert prompt is not None
    assert added(chat, one, prompt).count("found a marsupial") == 1
    assert chat.prompt(QUESTION, one.message, result).endswith(added(chat, one, prompt))

    two = turn_of(chat, 1, prompt, SAID, chat.ending())
    assert (two.message["content"], list(two.calls)) == (SAID, [])
    so_far: list[Any] = [QUESTION, one.message, result]
    last = chat.form.next_prompt_ids(two, so_far, [QUESTION], [TOOL])
    whole = chat.prompt(*so_far, two.message, QUESTION)
    assert SAID in whole
    if last is None:
        assert name.startswith(REWRITING)
    else:
        assert whole.endswith(added(chat, two, last))


def added(chat: Chat, turn: Turn, prompt: Sequence[int]) -> str:
    """What stands in a prompt behind the tokens of a turn, which it begins with."""
    before = [*turn.prompt_ids, *turn.output_ids]
    assert list(prompt[: len(before)]) == before
    return chat.text(prompt[len(before) :])


@pytest.mark.parametrize("name", with_tools())
def test_several_calls_at_once_are_read_where_the_template_writes_several(name: str) -> None:
    chat = chat_of(name)
    several = [USUAL, {**USUAL, "word": "numbat"}]
    if chat.form.tool_support.takes_several:
        answer = chat.form.read(chat.ids(chat.calls(*several)), [TOOL])
        assert [call.arguments for call in answer.calls] == several
        assert answer.message["content"] == ""
    else:
        assert name.startswith(("gptoss", "llama3"))
        between = "" if name.startswith("gptoss") else ";\n"
        answer = chat.form.read(chat.ids(between.join(chat.calls(one) for one in several)), [TOOL])
        assert (list(answer.calls), answer.problem) == ([], "Make one call at a time.")


@pytest.mark.parametrize(
    ("name", "tools"), [*((name, ()) for name in TRL_TEMPLATES), *((name, (TOOL,)) for name in with_tools())]
)
def test_the_mark_behind_an_answer_is_no_part_of_it(name: str, tools: Sequence[Any]) -> None:
    in_parts = name.startswith(SEEING)
    chat = chat_of(name, in_parts=in_parts)
    answer = chat.form.read([*chat.ids(SAID), chat.ending(in_parts=in_parts)], tools)
    assert answer.message["content"] == SAID


@pytest.mark.parametrize("name", [name for name in TRL_TEMPLATES if not reader_of(name)])
def test_tools_are_refused_where_the_template_leaves_out_their_calls(name: str) -> None:
    form = chat_of(name).form
    assert form.prompt_ids([QUESTION], ()) or name.startswith(SEEING)
    with pytest.raises(DataError, match=r"environment\.gateway\.tools=auto: .* leaves out .*their calls"):
        form.prompt_ids([QUESTION], [TOOL])
    assert "an environment that offers tools is refused" in form.describe_tools()


@pytest.mark.parametrize("name", with_tools())
def test_a_reader_that_does_not_fit_is_an_error_at_the_start(name: str) -> None:
    fitting = reader_of(name)
    other = "mistral" if fitting == "hermes" else "hermes"
    with pytest.raises(ConfigError, match=rf"environment\.gateway\.tools={other}: .* as {fitting},.* Say auto\."):
        make_format(trl_tokenizer(name), GatewayConfig(tools=other))
    assert make_format(trl_tokenizer(name), GatewayConfig(tools=fitting)).describe_tools() == (
        chat_of(name).form.describe_tools()
    )


@pytest.mark.parametrize("name", ["lfm2", "phi3_5", "qwen2_5_vl"])
def test_a_reader_that_is_named_is_taken_and_what_is_left_out_is_told(name: str) -> None:
    form = make_format(trl_tokenizer(name), GatewayConfig(tools="hermes"))
    assert form.prompt_ids([QUESTION], [TOOL])
    assert "calls are read as hermes; the model's chat template leaves out" in form.describe_tools()


def test_a_template_that_wants_arguments_as_text_gets_text() -> None:
    chat = chat_of("deepseekv3")
    assert chat.form.tool_support.arguments_as_text
    assert json.dumps({"word": "quokka"}) in chat.calls({"word": "quokka"})
    assert chat.form.describe_tools() == (
        "calls are read as deepseek_v3; the model's chat template leaves out the tools, so write them into messages"
    )


def test_a_template_that_takes_nothing_at_all_leaves_everything_out() -> None:
    def refuse(*arguments: Any, **more: Any) -> str:
        raise DataError("no")

    assert tool_support(refuse).left_out == ("the tools", "their calls", "their results")

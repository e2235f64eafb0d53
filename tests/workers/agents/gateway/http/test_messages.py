"""Anthropic's messages by its own client."""

import anthropic
import pytest

from tests.workers.agents.gateway.chat_models import ADD, call_text, text_of
from tests.workers.agents.gateway.http.serving import USER, gateway, play

FUNCTION = ADD["function"]
TOOL = {"name": "add", "description": FUNCTION["description"], "input_schema": FUNCTION["parameters"]}
THOUGHT = "<think>\nadd\n</think>\n\n"
THINKING = {"thinking": {"type": "enabled", "budget_tokens": 1024}}


def test_an_answer_has_what_was_thought_said_and_called_as_blocks() -> None:
    async def scenario() -> None:
        async with gateway([THOUGHT + "So: " + call_text("add", '{"a": 1}')]) as open_gateway:
            system = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
            answer = await open_gateway.message(system=system, tools=[TOOL], **THINKING)
            (turn,) = open_gateway.sampler.turns
            assert [block.type for block in answer.content] == ["thinking", "text", "tool_use"]
            assert (answer.content[0].thinking, answer.content[1].text) == ("add", "So:")
            assert (answer.content[2].name, answer.content[2].input) == ("add", {"a": 1})
            assert (answer.stop_reason, answer.usage.output_tokens) == ("tool_use", len(turn.output_ids))
            assert answer.usage.input_tokens == len(turn.prompt_ids)
            assert "<|im_start|>system\nBe brief.<|im_end|>" in text_of(turn.prompt_ids)

    play(scenario())


def test_who_does_not_ask_for_thinking_gets_the_answer_alone() -> None:
    async def scenario() -> None:
        async with gateway([THOUGHT + "4", "5"]) as open_gateway:
            answer = await open_gateway.message()
            assert [block.type for block in answer.content] == ["text"]
            await open_gateway.message(USER, {"role": "assistant", "content": answer.content[0].text}, USER)
            assert [turn.parent for turn in open_gateway.sampler.turns] == [None, 0]

    play(scenario())


@pytest.mark.parametrize("thinks", [True, False])
def test_blocks_that_come_back_are_the_turn_that_they_were(thinks: bool) -> None:
    async def scenario() -> None:
        texts = [THOUGHT + "So: " + call_text("add", "{}") + call_text("add", '{"a": 1}'), "4", "5"]
        more = {"tools": [TOOL], **(THINKING if thinks else {})}
        async with gateway(texts) as open_gateway:
            said = [{"role": "user", "content": [{"type": "text", "text": "2 + 2?"}]}]
            first = await open_gateway.message(*said, **more)
            said.append({"role": "assistant", "content": first.content})
            results = [
                {"type": "tool_result", "tool_use_id": block.id, "content": [{"type": "text", "text": "4"}]}
                for block in first.content
                if block.type == "tool_use"
            ]
            said.append({"role": "user", "content": [*results, {"type": "text", "text": "Go on."}]})
            second = await open_gateway.message(*said, **more)
            said.append({"role": "assistant", "content": second.content[0].text})
            await open_gateway.message(*said, {"role": "user", "content": "sure?"}, **more)
            turns = open_gateway.sampler.turns
            assert [turn.parent for turn in turns] == [None, 0, 1]
            assert text_of(turns[1].prompt_ids).count("<tool_response>4</tool_response>") == 2
            assert "<|im_start|>user\nGo on.<|im_end|>" in text_of(turns[1].prompt_ids)

    play(scenario())


@pytest.mark.parametrize("text", ["four", THOUGHT + "So: " + call_text("add", '{"a": 1}') + call_text("add", "{}"), ""])
def test_a_stream_says_what_an_answer_says(text: str) -> None:
    async def scenario() -> None:
        async with gateway([text]) as open_gateway:
            asked = {"model": "policy", "max_tokens": 1000, "messages": [USER], "tools": [TOOL], **THINKING}
            async with open_gateway.anthropic.messages.stream(**asked) as stream:
                said = "".join([piece async for piece in stream.text_stream])
                whole = await stream.get_final_message()
            (turn,) = open_gateway.sampler.turns
            assert said == turn.message["content"]
            assert [block.input for block in whole.content if block.type == "tool_use"] == [
                call.arguments for call in turn.calls
            ]
            thought = [block.thinking for block in whole.content if block.type == "thinking"]
            assert thought == ([turn.message["reasoning_content"]] if "reasoning_content" in turn.message else [])
            assert whole.stop_reason == ("tool_use" if turn.calls else "end_turn")
            assert whole.usage.output_tokens == len(turn.output_ids)
            assert whole.usage.input_tokens == len(turn.prompt_ids)

    play(scenario())


def test_why_an_answer_ended_is_said() -> None:
    async def scenario() -> None:
        async with gateway(["abcdef", "one. two", "three"]) as open_gateway:
            cut = await open_gateway.message(max_tokens=3)
            assert (cut.stop_reason, cut.content[0].text) == ("max_tokens", "abc")
            stopped = await open_gateway.message(stop_sequences=["!", "."])
            assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", ".")
            assert stopped.content[0].text == "one"
            assert (await open_gateway.message()).stop_reason == "end_turn"

    play(scenario())


def test_sampling_is_what_was_asked_for() -> None:
    async def scenario() -> None:
        async with gateway(["x"], clients_sample=True) as open_gateway:
            await open_gateway.message(extra_body={"temperature": 0.5, "top_k": 3, "top_p": 0.9})
            (sampling,) = open_gateway.engines.samplings
            found = (sampling.temperature, sampling.top_k, sampling.top_p, sampling.max_tokens)
            assert found == (0.5, 3, 0.9, 1000)

    play(scenario())


def test_tokens_are_counted_without_a_turn() -> None:
    async def scenario() -> None:
        async with gateway(["one"]) as open_gateway:
            counted = await open_gateway.anthropic.messages.count_tokens(model="policy", messages=[USER], tools=[TOOL])
            answer = await open_gateway.message(tools=[TOOL])
            assert counted.input_tokens == answer.usage.input_tokens
            assert len(open_gateway.sampler.turns) == 1

    play(scenario())


def test_a_harnesss_accounts_do_not_break_a_history() -> None:
    async def scenario() -> None:
        async with gateway(["one", "two"]) as open_gateway:

            def system(number: int) -> list:
                account = {"type": "text", "text": f"x-anthropic-billing-header: cch={number}"}
                return [account, {"type": "text", "text": "Be brief."}]

            first = await open_gateway.message(system=system(1))
            said = {"role": "assistant", "content": first.content}
            await open_gateway.message(USER, said, USER, system=system(2))
            one, two = open_gateway.sampler.turns
            assert two.parent == one.id
            assert "billing" not in text_of(two.prompt_ids)

    play(scenario())


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"messages": []}, "messages: is missing or empty"),
        ({"messages": [{"role": "user"}]}, "messages[0].content: is missing"),
        ({"messages": [{"role": "assistant", "content": [IMAGE]}]}, "messages[0].content[0].type: image cannot be"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role: tool is not known"),
        ({"messages": [USER, {"role": "assistant", "content": "It is"}]}, "messages: the last one is the assistant's"),
        ({"system": 5}, "system: must be a list"),
        ({"max_tokens": "many"}, "max_tokens: must be a whole number"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type: web_search_20250305"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice: is not known"),
    ],
)
def test_what_cannot_be_done_is_refused_by_the_name_of_its_field(body: dict, named: str) -> None:
    async def scenario() -> None:
        async with gateway(["never"]) as open_gateway:
            asked = {"model": "policy", "max_tokens": 10, "messages": [USER]} | body
            with pytest.raises(anthropic.BadRequestError) as error:
                await open_gateway.anthropic.post("/v1/messages", cast_to=object, body=asked)
            assert error.value.body["error"]["type"] == "invalid_request_error"
            assert named in error.value.body["error"]["message"]

    play(scenario())

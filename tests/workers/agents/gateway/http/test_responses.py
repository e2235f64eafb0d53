"""The responses API by OpenAI's own client."""

import json

import openai
import pytest

from tests.workers.agents.gateway.chat_models import ADD, call_text, text_of
from tests.workers.agents.gateway.http.serving import gateway, play

TOOL = {"type": "function", **ADD["function"], "strict": False}  # type: ignore[dict-item]
THOUGHT = "<think>\nadd\n</think>\n\n"


def test_an_answer_has_what_was_thought_said_and_called_as_items() -> None:
    async def scenario() -> None:
        async with gateway([THOUGHT + "So: " + call_text("add", '{"a": 1}')]) as open_gateway:
            answer = await open_gateway.respond(instructions="Be brief.", tools=[TOOL])
            (turn,) = open_gateway.sampler.turns
            assert [item.type for item in answer.output] == ["reasoning", "message", "function_call"]
            assert answer.output[0].content[0].text == "add"
            assert (answer.output_text, answer.status) == ("So:", "completed")
            assert (answer.output[2].name, json.loads(answer.output[2].arguments)) == ("add", {"a": 1})
            assert answer.usage.input_tokens == len(turn.prompt_ids)
            assert answer.usage.output_tokens == len(turn.output_ids)
            assert "<|im_start|>system\nBe brief.<|im_end|>" in text_of(turn.prompt_ids)

    play(scenario())


@pytest.mark.parametrize("drops_thinking", [False, True])
def test_items_that_come_back_are_the_turn_that_they_were(drops_thinking: bool) -> None:
    async def scenario() -> None:
        texts = [THOUGHT + "So: " + call_text("add", "{}") + call_text("add", '{"a": 1}'), "4", "5"]
        async with gateway(texts) as open_gateway:
            items: list = [{"role": "user", "content": [{"type": "input_text", "text": "2 + 2?"}]}]
            first = await open_gateway.respond(items, tools=[TOOL])
            items += [item for item in first.output if not (drops_thinking and item.type == "reasoning")]
            for call in first.output[-2:]:
                items.append({"type": "function_call_output", "call_id": call.call_id, "output": "4"})
            second = await open_gateway.respond(items, tools=[TOOL])
            items += [item.model_dump(exclude_none=True) for item in second.output]
            await open_gateway.respond([*items, {"role": "user", "content": "sure?"}], tools=[TOOL])
            turns = open_gateway.sampler.turns
            assert [turn.parent for turn in turns] == [None, 0, 1]
            assert [turn.message["content"] for turn in turns] == ["So:", "4", "5"]

    play(scenario())


@pytest.mark.parametrize("text", ["four", THOUGHT + "So: " + call_text("add", '{"a": 1}') + call_text("add", "{}"), ""])
def test_a_stream_says_what_an_answer_says(text: str) -> None:
    async def scenario() -> None:
        async with gateway([text]) as open_gateway:
            kinds, said, thought = [], "", ""
            asked = {"model": "policy", "input": "2 + 2?", "tools": [TOOL]}
            async with open_gateway.openai.responses.stream(**asked) as stream:
                async for event in stream:
                    kinds.append(event.type)
                    said += event.delta if event.type == "response.output_text.delta" else ""
                    thought += event.delta if event.type == "response.reasoning_text.delta" else ""
                whole = await stream.get_final_response()
            (turn,) = open_gateway.sampler.turns
            assert (said, whole.output_text) == (turn.message["content"], turn.message["content"])
            assert thought == turn.message.get("reasoning_content", "")
            calls = [item for item in whole.output if item.type == "function_call"]
            assert [json.loads(item.arguments) for item in calls] == [call.arguments for call in turn.calls]
            assert (kinds[0], kinds[-1]) == ("response.created", "response.completed")
            assert whole.usage.output_tokens == len(turn.output_ids)

    play(scenario())


def test_events_are_numbered_and_an_answer_that_was_cut_short_is_incomplete() -> None:
    async def scenario() -> None:
        async with gateway(["abcdef", "abcdef"]) as open_gateway:
            events = [event async for event in await open_gateway.respond(stream=True, max_output_tokens=3)]
            assert [event.sequence_number for event in events] == list(range(len(events)))
            assert events[-1].type == "response.incomplete"
            answer = await open_gateway.respond(max_output_tokens=3)
            assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
            assert answer.output_text == "abc"

    play(scenario())


def test_a_response_goes_on_with_an_earlier_one_without_its_instructions() -> None:
    async def scenario() -> None:
        async with gateway(["one", "two", "three"]) as open_gateway:
            first = await open_gateway.respond("a", instructions="Count.")
            second = await open_gateway.respond("b", instructions="Count.", previous_response_id=first.id)
            await open_gateway.respond("c", previous_response_id=second.id)
            turns = open_gateway.sampler.turns
            assert [turn.parent for turn in turns] == [None, 0, None]
            assert [message["content"] for message in open_gateway.sampler.last_messages[""]] == [
                "a", "one", "b", "two", "c", "three",
            ]  # fmt: skip

    play(scenario())


def test_calls_of_an_earlier_response_are_answered_by_their_results_alone() -> None:
    async def scenario() -> None:
        async with gateway([call_text("add", "{}"), "4"]) as open_gateway:
            first = await open_gateway.respond("a", tools=[TOOL])
            result = {"type": "function_call_output", "call_id": first.output[0].call_id, "output": "4"}
            await open_gateway.respond([result], tools=[TOOL], previous_response_id=first.id)
            assert [turn.parent for turn in open_gateway.sampler.turns] == [None, 0]

    play(scenario())


def test_a_response_that_is_not_stored_cannot_be_gone_on_with() -> None:
    async def scenario() -> None:
        async with gateway(["one"]) as open_gateway:
            first = await open_gateway.respond("a", store=False)
            with pytest.raises(openai.BadRequestError, match="previous_response_id: no response of this attempt"):
                await open_gateway.respond("b", previous_response_id=first.id)

    play(scenario())


IMAGE = {"type": "input_image", "image_url": "data:image/png;base64,"}


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"input": []}, "input: is missing or empty"),
        ({"input": None}, "input: is missing or empty"),
        ({"input": [{"role": "system", "content": [IMAGE]}]}, "input[0].content[0].type: input_image cannot be read"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type: item_reference cannot be read"),
        ({"input": [{"type": "function_call", "name": "add", "arguments": "{}"}]}, "input[0].call_id: is missing"),
        ({"input": [{"role": "nobody", "content": "x"}]}, "input[0].role: nobody is not known"),
        ({"conversation": "conv_1"}, "conversation: is not supported"),
        ({"background": True}, "background: is not supported"),
        ({"truncation": "auto"}, "truncation: the conversation is not cut"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type: web_search cannot be offered"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "ad"}}, "tool_choice=ad: there is no such tool"),
    ],
)
def test_what_cannot_be_done_is_refused_by_the_name_of_its_field(body: dict, named: str) -> None:
    async def scenario() -> None:
        async with gateway(["never"]) as open_gateway:
            with pytest.raises(openai.BadRequestError) as error:
                await open_gateway.openai.post(
                    "/responses", cast_to=object, body={"model": "policy", "input": "?"} | body
                )
            assert named in error.value.body["message"]

    play(scenario())

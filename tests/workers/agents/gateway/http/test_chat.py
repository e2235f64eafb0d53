"""Chat completions by OpenAI's own client."""

import json

import openai
import pytest

from penstock.workers.agents.gateway.tool_calls import ANY, forced_call
from penstock.workers.protocols import Sampling
from tests.workers.agents.gateway.chat_models import ADD, call_text, ids_of, text_of
from tests.workers.agents.gateway.http.serving import USER, gateway, play


def test_a_message_is_answered_with_its_usage_and_a_reason_to_stop() -> None:
    async def scenario() -> None:
        async with gateway(["4"]) as open_gateway:
            answer = await open_gateway.chat({"role": "developer", "content": "Be brief."}, USER)
            (turn,) = open_gateway.sampler.turns
            assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("4", "stop")
            assert answer.choices[0].message.tool_calls is None
            assert answer.usage.prompt_tokens == len(turn.prompt_ids)
            assert answer.usage.completion_tokens == len(turn.output_ids) == 2
            assert text_of(turn.prompt_ids) == (
                "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n2 + 2?<|im_end|>\n<|im_start|>assistant\n"
            )

    play(scenario())


def test_a_tool_call_goes_out_and_its_result_comes_in_without_a_token_made_anew() -> None:
    async def scenario() -> None:
        texts = ["<think>\nadd\n</think>\n\n" + call_text("add", '{"b":2,  "a":2}'), "It is 4."]
        async with gateway(texts) as open_gateway:
            first = (await open_gateway.chat(USER, tools=[ADD])).choices[0]
            (call,) = first.message.tool_calls
            assert (first.finish_reason, first.message.content) == ("tool_calls", None)
            assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 2, "b": 2})
            assert first.message.reasoning_content == "add"
            said = first.message.model_dump(exclude_none=True) | {"content": None}
            del said["reasoning_content"]  # as most agents do
            result = {"role": "tool", "tool_call_id": call.id, "content": "4"}
            second = await open_gateway.chat(USER, said, result, tools=[ADD])
            assert second.choices[0].message.content == "It is 4."
            one, two = open_gateway.sampler.turns
            assert two.parent == one.id
            assert two.prompt_ids[: len(one.prompt_ids) + len(one.output_ids)] == [*one.prompt_ids, *one.output_ids]
            rest = text_of(two.prompt_ids[len(one.prompt_ids) + len(one.output_ids) :])
            assert rest == ("\n<|im_start|>tool\n<tool_response>4</tool_response><|im_end|>\n<|im_start|>assistant\n")

    play(scenario())


def test_a_stream_says_what_an_answer_says() -> None:
    async def scenario() -> None:
        text = "<think>\nadd them up\n</think>\n\nSo: " + call_text("add", '{"a": 1, "b": 2}') + call_text("add", "{}")
        async with gateway([text]) as open_gateway:
            asked = {"model": "policy", "messages": [USER], "tools": [ADD], "stream_options": {"include_usage": True}}
            async with open_gateway.openai.chat.completions.stream(**asked) as stream:
                thought = ""
                async for event in stream:
                    if event.type == "chunk" and event.chunk.choices:
                        thought += getattr(event.chunk.choices[0].delta, "reasoning_content", None) or ""
                whole = await stream.get_final_completion()
            (turn,) = open_gateway.sampler.turns
            message = whole.choices[0].message
            assert (thought, message.content, whole.choices[0].finish_reason) == ("add them up", "So:", "tool_calls")
            assert [json.loads(call.function.arguments) for call in message.tool_calls] == [{"a": 1, "b": 2}, {}]
            assert [call.id for call in message.tool_calls] == [call.id for call in turn.calls]
            assert whole.usage.completion_tokens == len(turn.output_ids)

    play(scenario())


def test_a_streams_chunks_end_with_a_reason_and_with_usage_only_if_asked_for() -> None:
    async def scenario() -> None:
        async with gateway(["four"]) as open_gateway:
            chunks = [chunk async for chunk in await open_gateway.chat(stream=True)]
            assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "four"
            assert [chunk.choices[0].finish_reason for chunk in chunks][-2:] == [None, "stop"]
            assert all(chunk.usage is None for chunk in chunks)

    play(scenario())


def test_what_a_client_sends_does_not_replace_the_runs_sampling_and_is_counted() -> None:
    """Clients send defaults of their own, and the trainer knows of the run's alone."""

    async def scenario() -> None:
        run = Sampling(temperature=0.8, top_p=0.9, max_tokens=100)
        async with gateway(["x"] * 3, sampling=run) as open_gateway:
            await open_gateway.chat(temperature=0.2, top_p=0.9, max_tokens=7, extra_body={"top_k": 5, "min_p": 0.0})
            await open_gateway.message(extra_body={"temperature": 1.0})
            answer = await open_gateway.respond(temperature=0)
            found = [(one.temperature, one.top_p, one.top_k) for one in open_gateway.engines.samplings]
            assert (found, open_gateway.engines.samplings[0].max_tokens) == ([(0.8, 0.9, 0)] * 3, 7)
            counts = open_gateway.sampler.counts
            ignored = {name: count for name, count in counts.items() if name.startswith("ignored_") and count}
            assert ignored == {"ignored_temperature": 3, "ignored_top_k": 1}
            assert (counts["turns_greedy"], answer.temperature) == (0, None)
            assert [turn.temperature for turn in open_gateway.sampler.turns] == [0.8] * 3

    play(scenario())


def test_a_greedy_attempt_is_greedy_whatever_a_client_may_choose() -> None:
    """Evaluation's, with `environment.gateway.sampling=client`."""

    async def scenario() -> None:
        greedy = Sampling(temperature=0.0, max_tokens=100)
        async with gateway(["x"] * 2, sampling=greedy, clients_sample=True) as open_gateway:
            await open_gateway.chat(temperature=0.7, top_p=0.9, max_tokens=7)
            await open_gateway.chat(temperature=0)
            found = [(one.temperature, one.top_p, one.max_tokens) for one in open_gateway.engines.samplings]
            assert found == [(0.0, 1.0, 7), (0.0, 1.0, 100)]
            ignored = {name: n for name, n in open_gateway.sampler.counts.items() if name.startswith("ignored_") and n}
            assert ignored == {"ignored_temperature": 1, "ignored_top_p": 1}

    play(scenario())


def test_sampling_is_what_was_asked_for_within_what_the_run_allows() -> None:
    async def scenario() -> None:
        async with gateway(["abcdef", "one. two", "x"], clients_sample=True) as open_gateway:
            more = {"top_k": 5, "min_p": 0.1}
            answer = await open_gateway.chat(
                temperature=0.5, top_p=0.9, max_completion_tokens=3, seed=7, user="me", metadata={"a": "b"},
                extra_body=more,
            )  # fmt: skip
            sampling = open_gateway.engines.samplings[0]
            found = (sampling.temperature, sampling.top_p, sampling.max_tokens, sampling.top_k, sampling.min_p)
            assert found == (0.5, 0.9, 3, 5, 0.1)
            assert sampling.seed is None
            assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("abc", "length")
            stopped = await open_gateway.chat(stop=". ")
            assert (stopped.choices[0].message.content, stopped.choices[0].finish_reason) == ("one", "stop")
            await open_gateway.chat(max_tokens=10**9)
            assert open_gateway.engines.samplings[2].max_tokens == 10_000
            assert [turn.temperature for turn in open_gateway.sampler.turns] == [0.5, 1.0, 1.0]

    play(scenario())


def test_an_answer_that_a_stop_string_ended_goes_on_with_its_tokens() -> None:
    async def scenario() -> None:
        async with gateway(["one. two", "three"]) as open_gateway:
            first = (await open_gateway.chat(stop=["."])).choices[0].message
            await open_gateway.chat(USER, {"role": "assistant", "content": first.content}, USER)
            one, two = open_gateway.sampler.turns
            assert (one.stopped_by, two.parent) == (".", one.id)
            assert text_of(one.output_ids) == "one."

    play(scenario())


def test_logprobs_are_those_of_the_sampled_tokens() -> None:
    async def scenario() -> None:
        async with gateway(["ab", "cd"]) as open_gateway:
            whole = (await open_gateway.chat(logprobs=True)).choices[0].logprobs.content
            assert [entry.token for entry in whole] == [f"token_id:{token}" for token in ids_of("ab<|im_end|>")]
            assert [entry.logprob for entry in whole] == open_gateway.sampler.turns[0].logprobs
            chunks = [chunk async for chunk in await open_gateway.chat(stream=True, logprobs=True)]
            streamed = [
                entry for chunk in chunks if chunk.choices[0].logprobs for entry in chunk.choices[0].logprobs.content
            ]
            assert [entry.logprob for entry in streamed] == open_gateway.sampler.turns[1].logprobs

    play(scenario())


def test_a_call_that_cannot_be_read_is_text_for_the_agent_to_see() -> None:
    async def scenario() -> None:
        broken = '<tool_call>\n{"name": "add", "arguments": {"a": }\n</tool_call>'
        async with gateway([broken, "sorry"]) as open_gateway:
            first = (await open_gateway.chat(USER, tools=[ADD])).choices[0]
            assert (first.message.content, first.message.tool_calls, first.finish_reason) == (broken, None, "stop")
            await open_gateway.chat(USER, {"role": "assistant", "content": broken}, USER, tools=[ADD])
            one, two = open_gateway.sampler.turns
            assert "no JSON" in one.problem
            assert two.parent == one.id

    play(scenario())


IMAGE = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}]
CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": "[1]"}}


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"n": 2}, "n: there is one answer"),
        ({"messages": []}, "messages: is missing or empty"),
        ({"messages": "hello"}, "messages: must be a list, not text"),
        ({"messages": ["hello"]}, "messages[0]: must be an object"),
        ({"messages": [{"content": "x"}]}, "messages[0].role: is missing"),
        ({"messages": [{"role": "function", "content": "x"}]}, "messages[0].role: function is not known"),
        ({"messages": [USER, {"role": "system", "content": IMAGE}]}, "messages[1].content[0].type: image_url"),
        ({"messages": [{"role": "tool", "content": "4"}]}, "messages[0].tool_call_id: is missing"),
        ({"messages": [{"role": "assistant", "tool_calls": [CALL]}]}, "function.arguments: must be a JSON object"),
        ({"temperature": -1}, "temperature: must be a number of at least 0, not -1"),
        ({"temperature": "hot"}, 'temperature: must be a number of at least 0, not "hot"'),
        ({"top_p": 1.5}, "top_p: must be a number from"),
        ({"max_tokens": 0}, "max_tokens: must be a whole number of at least 1, not 0"),
        ({"stop": [""]}, "stop: must be a text or a list of texts"),
        ({"presence_penalty": 0.5}, "presence_penalty: penalties are not supported"),
        ({"logit_bias": {"5": 1}}, "logit_bias: is not supported"),
        ({"top_logprobs": 3, "logprobs": True}, "top_logprobs: only the log-probabilities of sampled tokens"),
        ({"modalities": ["text", "audio"]}, "modalities: the policy answers in text alone"),
        ({"tools": [ADD], "tool_choice": {"type": "allowed_tools"}}, "tool_choice: is not known"),
        ({"tool_choice": "required"}, "tool_choice: a call is asked for, and there are no tools"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type: web_search cannot be offered"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name: is missing"),
        ({"response_format": {"type": "xml"}}, "response_format.type: xml is not known"),
    ],
)  # fmt: skip
def test_what_cannot_be_done_is_refused_by_the_name_of_its_field(body: dict, named: str) -> None:
    async def scenario() -> None:
        async with gateway(["never"]) as open_gateway:
            with pytest.raises(openai.BadRequestError) as error:
                await open_gateway.openai.post(
                    "/chat/completions", cast_to=object, body={"model": "policy", "messages": [USER]} | body
                )
            assert named in error.value.body["message"]
            assert open_gateway.engines.prompts == []

    play(scenario())


def test_a_call_that_is_required_is_the_structure_of_the_turn() -> None:
    async def scenario() -> None:
        async with gateway([call_text("add", '{"a": 1, "b": 2}')]) as open_gateway:
            answer = await open_gateway.chat(USER, tools=[ADD], tool_choice="required")
            assert [call.function.name for call in answer.choices[0].message.tool_calls] == ["add"]
            (turn,) = open_gateway.sampler.turns
            assert turn.sampling == {"structure": forced_call("hermes", [ADD], ANY)}
            assert open_gateway.sampler.counts["turns_structured"] == 1

    play(scenario())


def test_without_tools_to_choose_from_none_are_offered() -> None:
    async def scenario() -> None:
        async with gateway(["4"]) as open_gateway:
            await open_gateway.chat(USER, tools=[ADD], tool_choice="none")
            assert "add" not in text_of(open_gateway.engines.prompts[0])

    play(scenario())

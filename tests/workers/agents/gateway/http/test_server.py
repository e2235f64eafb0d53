"""What comes of keys, retries, hang-ups, limits and engines that are gone, for the real clients."""

import asyncio
import json
from typing import Any

import aiohttp
import anthropic
import openai
import pytest

from penstock.conf.environment import GatewayConfig
from penstock.conf.errors import AttemptOver, DataError, DeadlineExceeded
from penstock.workers.agents.gateway.client_errors import BadRequest
from penstock.workers.agents.gateway.client_requests import MOST_VALUES, arguments_of, parsed
from penstock.workers.agents.gateway.http_server import MAX_BODY_BYTES, AttemptKeys, HttpServer, advertised_host
from penstock.workers.agents.trajectory import Trajectory, row_columns, segments_of
from tests.workers.agents.gateway.chat_models import text_of
from tests.workers.agents.gateway.http.serving import USER, Gateway, gateway, play, until

ASKED = {"model": "policy", "messages": [USER], "max_tokens": 100}
PATHS = ["/chat/completions", "/responses", "/messages"]


async def post(open_gateway: Gateway, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
    """Post by hand what the clients would not send."""
    data = body if isinstance(body, bytes) else json.dumps(body if body is not None else ASKED | {"input": "?"})
    keyed = {"authorization": f"Bearer {open_gateway.key}", "content-type": "application/json"} | headers
    async with aiohttp.ClientSession() as client, client.post(open_gateway.url + path, data=data, headers=keyed) as got:
        return got.status, await got.json()


async def refused(asking: Any, kind: type[Exception]) -> Any:
    with pytest.raises(kind) as error:
        await asking
    return error.value


@pytest.mark.parametrize(("given", "told"), [
    ({}, "127.0.0.1"),
    ({"host": "0.0.0.0"}, "10.1.2.3"),
    ({"host": "::"}, "10.1.2.3"),
    ({"host": "10.9.9.9"}, "10.9.9.9"),
    ({"host": "0.0.0.0", "address": "gateway.example"}, "gateway.example"),
])  # fmt: skip
def test_agents_are_told_an_address_that_they_can_reach(given: dict[str, str], told: str) -> None:
    assert advertised_host(GatewayConfig(**given), "10.1.2.3") == told


def test_a_server_on_every_interface_tells_another_host_and_answers_there() -> None:
    async def scenario() -> None:
        for address, url in (
            ("127.0.0.1", "http://127.0.0.1:"),
            ("", "http://0.0.0.0:"),
            ("fd00::1", "http://[fd00::1]:"),
        ):
            server = HttpServer(AttemptKeys())
            found = await server.start("0.0.0.0", 0, address)
            assert found.startswith(url)
            port = found.removesuffix("/v1").rpartition(":")[2]
            async with aiohttp.ClientSession() as client, client.get(f"http://127.0.0.1:{port}/v1/models") as got:
                assert got.status == 401
            await server.stop()

    asyncio.run(scenario())


def test_a_request_without_a_key_or_with_one_that_nobody_has_is_told_what_to_do() -> None:
    async def scenario() -> None:
        async with gateway(["never"]) as open_gateway:
            client = open_gateway.openai.with_options(api_key="wrong")
            asking = client.chat.completions.create(model="policy", messages=[USER])
            assert "ctx.api_key" in (await refused(asking, openai.AuthenticationError)).body["message"]
            other = open_gateway.anthropic.with_options(api_key="wrong")
            error = await refused(other.messages.create(**ASKED), anthropic.AuthenticationError)
            assert error.body["error"]["type"] == "authentication_error"
            status, said = await post(open_gateway, "/chat/completions", authorization="")
            assert (status, said["error"]["code"]) == (401, "invalid_api_key")
            assert "Authorization: Bearer KEY" in said["error"]["message"]
            assert open_gateway.engines.prompts == []

    play(scenario())


def test_a_key_is_an_attempt_and_no_longer_good_when_that_has_ended() -> None:
    async def scenario() -> None:
        async with gateway(["one"]) as open_gateway:
            await open_gateway.chat()
            open_gateway.sampler.end(AttemptOver("the attempt has ended"))
            open_gateway.keys.dismiss(open_gateway.key)
            await refused(open_gateway.chat(), openai.AuthenticationError)
            await refused(open_gateway.message(), anthropic.AuthenticationError)

    play(scenario())


def test_keys_come_as_either_protocol_sends_them() -> None:
    async def scenario() -> None:
        async with gateway(["one", "two"]) as open_gateway:
            key = {"x-api-key": open_gateway.key, "authorization": ""}
            assert (await post(open_gateway, "/chat/completions", **key))[0] == 200
            assert (await post(open_gateway, "/messages"))[0] == 200

    play(scenario())


def test_there_is_one_model_by_whatever_name() -> None:
    async def scenario() -> None:
        async with gateway(["one", "two"]) as open_gateway:
            assert [model.id async for model in open_gateway.openai.models.list()] == ["policy"]
            assert [model.id async for model in open_gateway.anthropic.models.list()] == ["policy"]
            answer = await open_gateway.openai.chat.completions.create(model="gpt-5", messages=[USER])
            assert answer.model == "gpt-5"

    play(scenario())


def test_a_client_chooses_one_of_several_policies_by_its_model() -> None:
    async def scenario() -> None:
        names = ["solver", "proposer"]
        async with gateway(lambda prompt: "4", policies=names) as open_gateway:
            client = open_gateway.openai
            assert [model.id async for model in client.models.list()] == names
            assert [model.id async for model in open_gateway.anthropic.models.list()] == names
            for name in ("proposer", "gpt-5", "solver"):
                answer = await client.chat.completions.create(model=name, messages=[USER])
                assert answer.model == name
            await open_gateway.anthropic.messages.create(model="proposer", messages=[USER], max_tokens=9)
            said = ["proposer", "solver", "solver", "proposer"]
            assert [turn.policy for turn in open_gateway.sampler.turns] == said
            assert [sampling.policy for sampling in open_gateway.engines.samplings] == said

    play(scenario())


def test_a_retry_gets_the_answer_of_the_policy_that_it_asks() -> None:
    async def scenario() -> None:
        async with gateway(["one", "two", "three"], policies=["solver", "proposer"]) as open_gateway:
            completions, again = open_gateway.openai.chat.completions, {"x-stainless-retry-count": "1"}
            for name, headers, text in (("solver", {}, "one"), ("proposer", again, "two"), ("solver", again, "one")):
                answer = await completions.create(model=name, messages=[USER], extra_headers=headers)
                assert answer.choices[0].message.content == text

    play(scenario())


def test_a_turn_that_takes_long_is_waited_for_with_signs_of_life() -> None:
    async def scenario() -> None:
        async with gateway(["one", "two", "three"], waiting_s=0.01) as open_gateway:
            client, engines = open_gateway.openai, open_gateway.engines
            for stream in (
                client.chat.completions.stream,
                client.responses.stream,
                open_gateway.anthropic.messages.stream,
            ):
                engines.open.clear()
                asked = {"model": "policy", "input": "?"} if stream == client.responses.stream else ASKED
                async with stream(**asked) as events:  # it has begun before there is an answer
                    assert not engines.open.is_set()
                    engines.open.set()
                    async for _ in events:
                        pass
            assert len(open_gateway.sampler.turns) == 3

    play(scenario())


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("streamed", [False, True])
def test_a_retry_of_what_was_answered_gets_the_same_turn(path: str, streamed: bool) -> None:
    async def scenario() -> None:
        async with gateway(["one", "two"]) as open_gateway:
            body = ASKED | {"input": "?", "stream": False}
            _, first = await post(open_gateway, path, body)
            retry = {"x-stainless-retry-count": "1"}
            if streamed:
                async with aiohttp.ClientSession() as client:
                    headers = {"authorization": f"Bearer {open_gateway.key}"} | retry
                    url = open_gateway.url + path
                    async with client.post(url, json=body | {"stream": True}, headers=headers) as got:
                        assert first["id"] in await got.text()
            else:
                _, second = await post(open_gateway, path, body, **retry)
                assert second["id"] == first["id"]
            assert len(open_gateway.engines.sampled) == len(open_gateway.sampler.turns) == 1
            _, third = await post(open_gateway, path, body)  # the same words again, and no retry
            assert third["id"] != first["id"]

    play(scenario())


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("top_k", 10**30), ("temperature", 2.5), ("top_p", 0), ("temperature", -1),
        ("structured_outputs", {"regex": "\ud800"}),
    ],
)  # fmt: skip
@pytest.mark.parametrize("streamed", [False, True])
def test_a_request_that_no_engine_can_take_is_a_bad_one(path: str, field: str, value: Any, streamed: bool) -> None:
    async def scenario() -> None:
        async with gateway(["one"]) as open_gateway:
            status, said = await post(open_gateway, path, ASKED | {"input": "?", "stream": streamed} | {field: value})
            assert (status, open_gateway.engines.prompts) == (400, [])
            assert field in said["error"]["message"] or "can be encoded" in said["error"]["message"]

    play(scenario())


@pytest.mark.parametrize(("path", "field"), [("/chat/completions", "stop"), ("/messages", "stop_sequences")])
def test_half_a_sign_in_a_stop_string_is_a_bad_request(path: str, field: str) -> None:
    async def scenario() -> None:
        async with gateway(["one"]) as open_gateway:
            status, said = await post(open_gateway, path, ASKED | {field: ["\ud83d"]})
            assert (status, open_gateway.engines.prompts) == (400, [])
            assert "can be encoded" in said["error"]["message"]

    play(scenario())


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("is_escaped", [True, False])
@pytest.mark.parametrize("streamed", [False, True])
def test_half_a_sign_that_a_harness_has_cut_is_sampled_on(path: str, is_escaped: bool, streamed: bool) -> None:
    cut, tools = "cut \ud83d", [{"type": "function", "function": {"name": "add", "description": "cut \ud83d"}}]
    words = {"role": "user", "content": cut}

    async def scenario() -> None:
        async with gateway(["one", "two"]) as open_gateway:
            messages = [words]
            for said in ("one", "two"):
                body = {"model": "policy", "max_tokens": 9, "stream": streamed, "metadata": {"user_id": cut}}
                body |= {"messages": messages, "input": messages} | (
                    {"tools": tools} if path == "/chat/completions" else {}
                )
                text = json.dumps(body, ensure_ascii=is_escaped).encode("utf-8", "surrogatepass")
                headers = {"authorization": f"Bearer {open_gateway.key}", "content-type": "application/json"}
                async with (
                    aiohttp.ClientSession() as client,
                    client.post(open_gateway.url + path, data=text, headers=headers) as got,
                ):
                    assert (got.status, bool(await got.text())) == (200, True)
                messages = [*messages, {"role": "assistant", "content": said}, words]
            sampler = open_gateway.sampler
            assert [turn.parent for turn in sampler.turns] == [None, 0]
            assert "cut ?" in text_of(open_gateway.engines.prompts[0])
            columns = row_columns([Trajectory(sampler.turns, said=sampler.last_messages[""])])
            assert columns["response_text"] == ["two"]
            assert json.loads(columns["transcript"][0])[0]["content"] == "cut ?"

    play(scenario())


@pytest.mark.parametrize("ask", [Gateway.chat, Gateway.respond, Gateway.message])
def test_a_client_that_times_out_and_asks_again_has_one_turn(ask: Any) -> None:
    async def scenario() -> None:
        async with gateway(["one", "two"], max_retries=1) as open_gateway:
            open_gateway.engines.open.clear()
            asking = asyncio.ensure_future(ask(open_gateway, timeout=2.0))
            await until(lambda: len(open_gateway.engines.prompts) == 2)
            await until(lambda: open_gateway.engines.num_cancelled == 1)
            open_gateway.engines.open.set()
            assert "two" in (await asking).model_dump_json()
            assert [turn.text for turn in open_gateway.sampler.turns] == ["two"]
            assert open_gateway.sampler.counts["turns_abandoned"] == 1

    play(scenario())


@pytest.mark.parametrize("stream", [False, True])
def test_who_hangs_up_while_the_turn_is_sampled_has_no_turn(stream: bool) -> None:
    async def scenario() -> None:
        async with gateway(["one", "two", "three"], waiting_s=0.02) as open_gateway:
            open_gateway.engines.open.clear()
            for ask in (open_gateway.chat, open_gateway.respond, open_gateway.message):
                before = open_gateway.engines.num_cancelled

                async def go(ask: Any = ask) -> None:
                    answer = await ask(stream=stream)
                    async for _ in answer:
                        pass

                asking = asyncio.ensure_future(go())
                await until(lambda before=before: len(open_gateway.engines.prompts) == before + 1)  # type: ignore[misc]
                asking.cancel()
                await until(lambda before=before: open_gateway.engines.num_cancelled == before + 1)  # type: ignore[misc]
            assert open_gateway.sampler.turns == []
            open_gateway.engines.open.set()

    play(scenario())


def test_an_answer_that_cannot_be_written_any_more_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with gateway(["one", "two", "three"]) as open_gateway:
            write_eof = aiohttp.web.StreamResponse.write_eof

            async def gone(*arguments: Any) -> None:
                raise ConnectionResetError("Cannot write to closing transport")

            for stream in (False, True):
                with monkeypatch.context() as patch:
                    patch.setattr(aiohttp.web.Response, "write_eof", gone)
                    patch.setattr(aiohttp.web.StreamResponse, "write_eof", gone)
                    with pytest.raises((openai.APIConnectionError, aiohttp.ClientError)):
                        await post(open_gateway, "/chat/completions", ASKED | {"stream": stream})
                assert aiohttp.web.StreamResponse.write_eof is write_eof
                assert open_gateway.sampler.turns == []
            status, said = await post(open_gateway, "/chat/completions", **{"x-stainless-retry-count": "1"})
            assert (status, said["choices"][0]["message"]["content"]) == (200, "three")
            assert [turn.text for turn in open_gateway.sampler.turns] == ["three"]

    play(scenario())


def test_requests_side_by_side_are_turns_and_two_histories_are_two_segments() -> None:
    async def scenario() -> None:
        async with gateway([str(number) for number in range(8)]) as open_gateway:
            firsts = await asyncio.gather(*(open_gateway.chat(USER) for _ in range(2)), open_gateway.message(USER))
            texts = [answer.choices[0].message.content for answer in firsts[:2]] + [firsts[2].content[0].text]
            assert sorted(texts) == ["0", "1", "2"]
            await asyncio.gather(
                *(open_gateway.chat(USER, {"role": "assistant", "content": text}, USER) for text in texts)
            )
            segments = segments_of(open_gateway.sampler.turns)
            assert [len(segment.runs) for segment in segments] == [2, 2, 2]

    play(scenario())


def test_limits_are_named_and_not_asked_for_again() -> None:
    async def scenario() -> None:
        async with gateway(["one"], max_turns=1, max_retries=2) as open_gateway:
            await open_gateway.chat()
            error = await refused(open_gateway.chat(), openai.BadRequestError)
            assert error.code == "limit_reached"
            assert error.body["message"].startswith("limit of turns reached")
            other = await refused(open_gateway.message(), anthropic.BadRequestError)
            assert "environment.max_turns" in other.body["error"]["message"]
            assert error.response.headers["x-should-retry"] == "false"
            assert len(open_gateway.engines.prompts) == 1

    play(scenario())


def test_a_too_long_conversation_is_told_so_that_a_harness_makes_it_shorter() -> None:
    async def scenario() -> None:
        async with gateway(["one"], max_model_len=100) as open_gateway:
            long = {"role": "user", "content": "a" * 100}
            error = await refused(open_gateway.chat(long), openai.BadRequestError)
            assert error.code == "context_length_exceeded"
            other = await refused(open_gateway.message(long), anthropic.BadRequestError)
            assert other.body["error"]["message"].startswith("prompt is too long")
            assert (await open_gateway.chat()).choices[0].message.content == "one"

    play(scenario())


def test_an_attempt_that_ends_meanwhile_ends_its_requests() -> None:
    async def scenario() -> None:
        async with gateway(["one", "two"], max_retries=2) as open_gateway:
            open_gateway.engines.open.clear()
            asking = [asyncio.ensure_future(ask()) for ask in (open_gateway.chat, open_gateway.message)]
            await until(lambda: len(open_gateway.engines.prompts) == 2)
            open_gateway.sampler.end(AttemptOver("the attempt has ended"))
            assert (await refused(asking[0], openai.APIStatusError)).status_code == 410
            assert (await refused(asking[1], anthropic.APIStatusError)).status_code == 410
            assert len(open_gateway.engines.prompts) == 2

    play(scenario())


def test_engines_that_are_gone_are_asked_again_and_what_they_refuse_is_not() -> None:
    async def scenario() -> None:
        async with gateway(["one"], max_retries=1) as open_gateway:
            engines = open_gateway.engines
            engines.fails_with = DeadlineExceeded("no engine was there")
            assert (await refused(open_gateway.chat(), openai.InternalServerError)).status_code == 503
            assert len(engines.prompts) == 2
            engines.fails_with = DataError("the prompt has no tokens")
            assert "no tokens" in str(await refused(open_gateway.chat(), openai.BadRequestError))
            engines.fails_with = RuntimeError("a bug")
            error = await refused(open_gateway.message(), anthropic.InternalServerError)
            assert (error.status_code, error.body["error"]["type"]) == (500, "api_error")
            assert len(engines.prompts) == 4
            assert open_gateway.sampler.turns == []

    play(scenario())


def test_an_error_in_a_stream_that_has_begun_is_an_event() -> None:
    async def scenario() -> None:
        async with gateway([], waiting_s=0.01) as open_gateway:
            engines = open_gateway.engines
            engines.fails_with = DeadlineExceeded("no engine was there")
            for ask, kind in (
                (open_gateway.chat, openai.APIError),
                (open_gateway.respond, openai.APIError),
                (open_gateway.message, anthropic.APIStatusError),
            ):
                engines.open.clear()
                stream = await ask(stream=True)
                engines.open.set()

                async def read(stream: Any = stream) -> None:
                    async for _ in stream:
                        pass

                assert "no engine was there" in str(await refused(read(), kind))

    play(scenario())


@pytest.mark.parametrize("path", PATHS)
def test_a_body_that_is_none_is_refused(path: str) -> None:
    async def scenario() -> None:
        async with gateway([], max_body_bytes=10_000) as open_gateway:
            for body, named in (
                (b"{", "the body is no JSON"), (b"\xff", "the body is no JSON"), (b"[]", "the body is a JSON object"),
                (b"[" * 9_000, "the body is no JSON"),
            ):  # fmt: skip
                status, said = await post(open_gateway, path, body)
                assert status == 400
                assert named in said["error"]["message"]
            status, said = await post(open_gateway, path, b" " * 20_000)
            assert status == 413
            assert "larger than this server takes" in said["error"]["message"]

    play(scenario())


def test_other_paths_and_methods_are_told_what_there_is() -> None:
    async def scenario() -> None:
        async with gateway([]) as open_gateway:
            status, said = await post(open_gateway, "/completions")
            assert status == 404
            assert "/v1/chat/completions" in said["error"]["message"]
            await refused(open_gateway.openai.responses.retrieve("resp_1"), openai.NotFoundError)
            await refused(open_gateway.anthropic.get("/v1/messages", cast_to=object), anthropic.APIStatusError)

    play(scenario())


def test_a_server_stops_while_requests_are_under_way() -> None:
    async def scenario() -> None:
        async with gateway(["one"]) as open_gateway:
            open_gateway.engines.open.clear()
            asking = asyncio.ensure_future(open_gateway.chat())
            await until(lambda: len(open_gateway.engines.prompts) == 1)
        with pytest.raises(openai.APIError):
            await asking

    play(scenario())


def test_values_that_escapes_hide_in_arguments_are_refused() -> None:
    call = parsed(b'{"arguments": "[' + 2**19 * rb"\u005b\u005d\u002c" + b'[]]"}')
    with pytest.raises(BadRequest, match="1,048,576 values"):
        arguments_of(call, "arguments")


def test_a_body_of_very_many_values_is_refused_before_it_is_parsed() -> None:
    async def scenario() -> None:
        async with gateway(["4"], max_body_bytes=MAX_BODY_BYTES) as served:
            many = {"unknown": [[]] * MOST_VALUES}
            for asking in (served.chat, served.respond, served.message):
                kind = anthropic.BadRequestError if asking == served.message else openai.BadRequestError
                assert "1,048,576 values" in str(await refused(asking(extra_body=many), kind))
            answer = await served.chat(extra_body={"unknown": ["a, b" * 2**17]})
            assert answer.choices[0].message.content == "4"

    play(scenario())

"""Pictures that agents send, in each protocol: what a real engine reads of them, and what is refused."""

import base64
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from penstock.conf.rollout import RolloutConfig
from penstock.workers.agents.gateway.chat_formats import TemplateFormat
from penstock.workers.agents.gateway.http_server import MAX_BODY_BYTES, AttemptKeys, HttpServer
from penstock.workers.agents.gateway.turn_sampler import TurnLimits, TurnSampler
from penstock.workers.agents.trajectory import segments_of
from penstock.workers.models.tokenizer import load_tokenizer
from penstock.workers.pictures.processor import PictureProcessor
from penstock.workers.pictures.prompt_pictures import PromptPictures
from penstock.workers.protocols import Completion, EngineSpec, Sampling
from penstock.workers.rollout.engine_hf import HfEngine
from tests.vision_models import picture
from tests.workers.agents.gateway.http.serving import Gateway, gateway, play
from tests.workers.agents.gateway.http.test_server import post
from tests.workers.pictures.test_encoding import EPS, of_size

ONE, TWO = picture(56, 84, 1), picture(84, 140, 2, "JPEG")


class Engines:
    def __init__(self, engine: HfEngine) -> None:
        self._engine = engine

    async def sample(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        conversation: object,
        pictures: PromptPictures | None = None,
    ) -> Completion:
        (completion,) = await self._engine.generate(prompt_ids, 1, sampling, pictures)
        return completion


@asynccontextmanager
async def seeing_gateway(path: Path) -> AsyncIterator[Gateway]:
    """A gateway to the tiny model on the engine of transformers."""
    engine = HfEngine(EngineSpec(RolloutConfig(engine="hf", max_model_len=256, max_pictures=4), str(path)))
    await engine.start()
    keys = AttemptKeys()
    form = TemplateFormat(load_tokenizer(str(path)), "hermes", in_parts=True)
    sampler = TurnSampler(
        Engines(engine), form, Sampling(max_tokens=6, seed=3),
        TurnLimits(max_model_len=256, max_pictures=4), processor=PictureProcessor.of(str(path)),
    )  # fmt: skip
    server = HttpServer(keys)
    keys.base_url = await server.start("127.0.0.1", 0)
    made: Any = Gateway(keys, sampler, None, *keys.admit(sampler))  # type: ignore[arg-type]
    try:
        yield made
    finally:
        await made.close()
        await server.stop()
        await engine.close()


def base64_of(data: bytes) -> str:
    return base64.b64encode(data).decode()


def url_of(data: bytes) -> str:
    kind = "png" if data.startswith(b"\x89PNG") else "jpeg"
    return f"data:image/{kind};base64,{base64_of(data)}"


def chat_picture(data: bytes) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url_of(data), "detail": "auto"}}


def item_picture(data: bytes) -> dict[str, Any]:
    return {"type": "input_image", "image_url": url_of(data), "detail": "auto"}


def block_picture(data: bytes) -> dict[str, Any]:
    kind = "image/png" if data.startswith(b"\x89PNG") else "image/jpeg"
    return {"type": "image", "source": {"type": "base64", "media_type": kind, "data": base64_of(data)}}


async def chats(served: Gateway) -> None:
    asked: list[Any] = [{"role": "user", "content": [chat_picture(ONE), {"type": "text", "text": "What?"}]}]
    answer = await served.chat(*asked)
    asked += [answer.choices[0].message, {"role": "user", "content": [chat_picture(TWO)]}]
    await served.chat(*asked)


async def responds(served: Gateway) -> None:
    asked = {"role": "user", "content": [item_picture(ONE), {"type": "input_text", "text": "What?"}]}
    answer = await served.respond([asked])
    await served.respond([{"role": "user", "content": [item_picture(TWO)]}], previous_response_id=answer.id)


async def sends(served: Gateway) -> None:
    asked: list[Any] = [{"role": "user", "content": [block_picture(ONE), {"type": "text", "text": "What?"}]}]
    answer = await served.message(*asked)
    asked += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": [block_picture(TWO)]}]
    await served.message(*asked)


def test_each_protocol_shows_the_policy_the_same(vision_model: Path) -> None:
    """Two turns, the second with a picture of its own, by the clients of the protocols and a real engine."""
    found = []

    async def scenario() -> None:
        async with seeing_gateway(vision_model) as served:
            for talk in (chats, responds, sends):
                await talk(served)
            turns = served.sampler.turns
            found.extend((turn.prompt_ids, turn.pictures, turn.output_ids) for turn in turns)
            assert len(segments_of(turns)) == 3

    play(scenario())
    first, second = found[0], found[1]
    assert (first[1].encoded, second[1].encoded) == ((ONE,), (ONE, TWO))
    assert [ids for ids, _, _ in found[::2]] == [first[0]] * 3
    assert [pictures for _, pictures, _ in found[::2]] == [first[1]] * 3
    assert all(pictures.encoded == (ONE, TWO) and pictures.ranges[0] == (1, 6) for _, pictures, _ in found[1::2])


def test_results_of_tools_have_pictures_where_the_protocol_lets_them(vision_model: Path) -> None:
    call = {"type": "tool_use", "id": "c1", "name": "look", "input": {}}
    result = {
        "type": "tool_result",
        "tool_use_id": "c1",
        "content": [block_picture(TWO), {"type": "text", "text": "!"}],
    }
    blocks = [{"role": "user", "content": "Look."}, {"role": "assistant", "content": [call]},
              {"role": "user", "content": [result, block_picture(ONE)]}]  # fmt: skip
    items = [{"role": "user", "content": "Look."},
             {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"},
             {"type": "function_call_output", "call_id": "c1",
              "output": [item_picture(TWO), {"type": "input_text", "text": "!"}]},
             {"role": "user", "content": [item_picture(ONE)]}]  # fmt: skip

    async def scenario() -> None:
        async with seeing_gateway(vision_model) as served:
            await served.message(*blocks)
            await served.respond(items)
            one, other = served.sampler.turns
            assert one.pictures.encoded == (TWO, ONE)
            assert (one.prompt_ids, one.pictures) == (other.prompt_ids, other.pictures)

    play(scenario())


FAR = "https://example.org/a.png"
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("/chat/completions", {"type": "image_url", "image_url": {"url": FAR}},
     "messages[0].content[0].image_url.url: https: is not fetched: send the picture itself, as data:image/png;base64"),
    ("/chat/completions", {"type": "image_url", "image_url": {"url": "data:image/png;base64,?"}},
     "messages[0].content[0].image_url.url: it is no base64"),
    ("/chat/completions", {"type": "image_url", "image_url": {"url": url_of(b"text")}},
     "message 1, part 1: its picture cannot be read: its 4 bytes are no picture"),
    ("/chat/completions", {"type": "input_audio", "input_audio": {}}, "input_audio cannot be read here"),
    ("/responses", {"type": "input_image", "image_url": FAR}, "input[0].content[0].image_url: https: is not fetched"),
    ("/responses", {"type": "input_image", "file_id": "file_1"}, "input[0].content[0].file_id: files are not kept"),
    ("/messages", {"type": "image", "source": {"type": "url", "url": FAR}},
     "messages[0].content[0].source.type: url cannot be read, as nothing is fetched"),
    ("/messages", {"type": "document", "source": {}}, "messages[0].content[0].type: document cannot be read here"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "part", "named"), REFUSED)
def test_what_cannot_be_seen_is_refused_by_name(path: str, part: dict[str, Any], named: str) -> None:
    async def scenario() -> None:
        async with gateway(["never"]) as served:
            said = [{"role": "user", "content": [part]}]
            status, answer = await post(served, path, {"input" if path == "/responses" else "messages": said})
            assert status == 400
            assert named in answer["error"]["message"]
            assert served.engines.prompts == []

    play(scenario())


def test_a_run_of_text_refuses_pictures_and_names_the_key() -> None:
    async def scenario() -> None:
        async with gateway(["never"]) as served:
            with pytest.raises(openai.BadRequestError, match=r"1 pictures, and rollout\.max_pictures=0"):
                await served.chat({"role": "user", "content": [chat_picture(ONE)]})

    play(scenario())


@pytest.mark.parametrize("path", ["/chat/completions", "/responses", "/messages"])
def test_a_body_above_32_mib_is_refused_with_what_to_do_instead(path: str) -> None:
    async def scenario() -> None:
        async with gateway(["never"], max_body_bytes=MAX_BODY_BYTES) as served:
            status, answer = await post(served, path, b" " * (32 * 2**20 + 1))
            assert status == 413
            assert "as JPEG, or leave out earlier ones" in answer["error"]["message"]
            status, answer = await post(served, path, b" " * (32 * 2**20))
            assert status == 400
            assert "the body is no JSON" in answer["error"]["message"]

    play(scenario())


@pytest.mark.parametrize(("data", "words"), [(EPS, "no picture in PNG"), (of_size(2**13, 2**13), "8192 x 8192 pixels")])
def test_a_picture_that_would_be_expensive_is_refused_to_every_client(data: bytes, words: str) -> None:
    async def scenario() -> None:
        async with gateway(["never"]) as served:
            text = base64.b64encode(data).decode()
            url = f"data:image/png;base64,{text}"
            with pytest.raises(openai.BadRequestError, match=words):
                await served.chat({"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]})
            with pytest.raises(openai.BadRequestError, match=words):
                await served.respond([{"role": "user", "content": [{"type": "input_image", "image_url": url}]}])
            source = {"type": "base64", "media_type": "image/png", "data": text}
            with pytest.raises(anthropic.BadRequestError, match=words):
                await served.message({"role": "user", "content": [{"type": "image", "source": source}]})

    play(scenario())

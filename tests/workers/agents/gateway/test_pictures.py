"""Conversations with pictures: what an engine reads of each turn, and which history a picture belongs to."""

import asyncio
import base64
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from penstock.conf.environment import EnvironmentConfig, GatewayConfig
from penstock.conf.errors import ConfigError, DataError
from penstock.workers.agents.attempts import AttemptRunner
from penstock.workers.agents.environment import Task
from penstock.workers.agents.gateway.chat_formats import TemplateFormat, make_format
from penstock.workers.agents.gateway.conversation import kept
from penstock.workers.agents.gateway.http_server import AttemptKeys
from penstock.workers.agents.gateway.turn_sampler import PromptWriter, TurnLimits, TurnSampler
from penstock.workers.agents.trajectory import Turn, row_columns, segments_of
from penstock.workers.fresh_model import EOS_ID
from penstock.workers.models.tokenizer import load_tokenizer
from penstock.workers.pictures.processor import PictureProcessor
from penstock.workers.pictures.prompt_pictures import PromptPictures
from penstock.workers.protocols import Completion, Sampling
from tests.amounts import amount
from tests.vision_models import END, IMAGE, START, picture

ONE, TWO = picture(56, 84, 1), picture(84, 140, 2)
OTHER = picture(56, 84, 9)
"""A picture of the first one's size."""


class Saying:
    """Engines that say given texts, and keep what they were asked."""

    def __init__(self, tokenizer: Any, *texts: str) -> None:
        self._tokenizer, self._texts = tokenizer, iter(texts)
        self.asked: list[tuple[list[int], PromptPictures | None]] = []

    async def sample(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        conversation: object,
        pictures: PromptPictures | None = None,
    ) -> Completion:
        self.asked.append((list(prompt_ids), pictures))
        text = next(self._texts)
        ids = [*self._tokenizer(text)["input_ids"], EOS_ID]
        return Completion(ids, [-1.0] * len(ids), [0] * len(ids), text, "stop")


class Seeing:
    """Tokenizer, format and processor of the tiny model."""

    def __init__(self, path: Path) -> None:
        self.tokenizer, self.processor = load_tokenizer(str(path)), PictureProcessor.of(str(path))
        self.form = TemplateFormat(self.tokenizer, "hermes", in_parts=True)

    def sampler(self, *texts: str, max_pictures: int = 4) -> TurnSampler:
        processor = self.processor if max_pictures else None
        limits = TurnLimits(max_model_len=500, max_pictures=max_pictures)
        return TurnSampler(Saying(self.tokenizer, *texts), self.form, Sampling(), limits, processor=processor)

    def text(self, token_ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(token_ids))


@pytest.fixture(scope="module")
def seeing(vision_model: Path) -> Seeing:
    return Seeing(vision_model)


def user(*content: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(content)}


def said(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def turns_of(sampler: TurnSampler, *conversations: Sequence[Any]) -> list[Turn]:
    async def scenario() -> list[Turn]:
        return [await sampler.sample(messages) for messages in conversations]

    return asyncio.run(scenario())


def test_a_later_turn_keeps_the_pictures_and_places_of_earlier_ones(seeing: Seeing) -> None:
    sampler = seeing.sampler("a cat", "a dog")
    first, second = turns_of(sampler, [user(ONE, "what?")], [user(ONE, "what?"), said("a cat"), user("and", TWO, "?")])
    assert seeing.text(first.prompt_ids) == f"{START}{IMAGE * 6}{END}what?\n"
    so_far = [*first.prompt_ids, *first.output_ids]
    assert second.prompt_ids[: len(so_far)] == so_far
    assert seeing.text(second.prompt_ids[len(so_far) :]) == f"\nand{START}{IMAGE * 15}{END}?\n"
    assert second.pictures == PromptPictures((ONE, TWO), ((1, 6), (len(so_far) + 5, 15)))
    assert (second.parent, len(segments_of(sampler.turns))) == (first.id, 1)
    for prompt_ids, pictures in sampler.engines.asked:
        seeing.processor.checked_features(prompt_ids, pictures)


def test_an_engine_refuses_a_turn_whose_earlier_picture_was_lost(seeing: Seeing) -> None:
    _, second = turns_of(seeing.sampler("a", "b"), [user(ONE, "?")], [user(ONE, "?"), said("a"), user(TWO)])
    left = PromptPictures(second.pictures.encoded[1:], second.pictures.ranges[1:])
    with pytest.raises(DataError, match="lost a picture"):
        seeing.processor.checked_features(second.prompt_ids, left)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=amount(40))
@given(st.lists(st.lists(st.sampled_from(["a", "b c", ONE, TWO]), min_size=1, max_size=3), min_size=1, max_size=4))
def test_a_conversation_that_goes_on_is_the_one_written_anew(seeing: Seeing, questions: list[list[Any]]) -> None:
    """Where the tokenizer writes an answer as it was sampled: whatever is expanded at once or turn by turn."""
    sampler, messages = seeing.sampler(*"abcd", max_pictures=12), list[Any]()
    writer = PromptWriter(seeing.form, seeing.processor, 12)
    for number, question in enumerate(questions):
        messages.append(user(*question))
        (turn,) = turns_of(sampler, messages)
        anew = writer.whole(kept(messages), ())
        assert (turn.prompt_ids, turn.pictures) == (anew.ids, anew.pictures)
        messages.append(said("abcd"[number]))
    assert len(segments_of(sampler.turns)) == 1


def test_the_same_text_with_another_picture_is_another_history(seeing: Seeing) -> None:
    sampler = seeing.sampler("a", "b", "c")
    _, other, again = turns_of(
        sampler, [user(ONE, "?")], [user(OTHER, "?"), said("a"), user("b")], [user(ONE, "?"), said("a"), user("b")]
    )
    assert (other.parent, again.parent) == (None, 0)
    assert other.prompt_ids == again.prompt_ids
    assert other.pictures != again.pictures
    assert sampler.counts["rewritten_by_client"] == 1
    assert [len(segment.runs) for segment in segments_of(sampler.turns)] == [2, 1]


def test_a_picture_at_another_place_among_the_words_is_another_history(seeing: Seeing) -> None:
    sampler = seeing.sampler("a", "b")
    _, moved = turns_of(sampler, [user(ONE, "is it?")], [user("is", ONE, " it?"), said("a"), user("b")])
    assert moved.parent is None


def data_url(data: bytes, kind: str = "png") -> str:
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def test_a_picture_may_be_given_in_any_form(seeing: Seeing) -> None:
    image = Image.open(io.BytesIO(ONE))
    forms = [
        user(ONE, "?"),
        user(image, "?"),
        user(bytearray(ONE), {"type": "text", "text": "?"}),
        user({"type": "image", "image": ONE}, "?"),
        user({"type": "image_url", "image_url": {"url": data_url(ONE)}}, "?"),
    ]
    turns = turns_of(seeing.sampler(*"abcde"), *([form] for form in forms))
    assert [turn.prompt_ids for turn in turns] == [turns[0].prompt_ids] * 5
    pixels = {seeing.processor.features(turn.pictures.encoded).pixel_values.tobytes() for turn in turns}
    assert len(pixels) == 1


def test_other_formats_are_kept_as_png_and_contents_without_pictures_as_text() -> None:
    bitmap = io.BytesIO()
    Image.open(io.BytesIO(ONE)).save(bitmap, "WEBP", lossless=True)
    (message,) = kept([user(bitmap.getvalue(), "a", "b")])
    assert message["content"][0]["image"].startswith(b"\x89PNG")
    assert message["content"][1] == {"type": "text", "text": "ab"}
    assert [one["content"] for one in kept([user("a", {"type": "text", "text": "b"}), said("c")])] == ["ab", "c"]


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ([b"no picture"], "message 1, part 1: its picture cannot be read: its 10 bytes are no picture"),
        (["a", data_url(ONE)[:40]], None),
        ([{"type": "image_url", "image_url": {"url": "data:image/png,x"}}], "is not in base64"),
        ([{"type": "image_url", "image_url": {"url": "https://a.org/b.png"}}], "'image_url' is neither a text nor"),
        ([{"type": "input_audio", "input_audio": {}}], "part 1: 'input_audio' is neither a text nor a picture"),
        ([4], "part 1: 'int' is neither a text nor a picture"),
    ],
)
def test_what_is_no_picture_is_refused(content: list[Any], named: str | None) -> None:
    if named is None:  # words that look like a URL are words
        assert kept([user(*content)])[0]["content"] == "".join(content)
        return
    with pytest.raises(DataError, match=named):
        kept([user(*content)])


@pytest.mark.parametrize(
    ("most", "named"), [(0, r"1 pictures, and rollout\.max_pictures=0\. Set it"), (2, "=2. Raise")]
)
def test_more_pictures_than_the_run_has_places_for_are_refused(seeing: Seeing, most: int, named: str) -> None:
    sampler, messages = seeing.sampler("a", "b", "c", max_pictures=most), list[Any]()
    for text in "abc"[:most]:
        messages += [user(ONE, "?")]
        turns_of(sampler, messages)
        messages += [said(text)]
    with pytest.raises(DataError, match=named):
        turns_of(sampler, [*messages, user(ONE)])


def test_words_that_are_a_placeholder_are_no_picture(seeing: Seeing) -> None:
    with pytest.raises(DataError, match=r"2 placeholders .* for 1 pictures"):
        turns_of(seeing.sampler("a"), [user(ONE, f"what is {IMAGE}?")])


def test_an_opponent_sees_too_and_is_no_turn(seeing: Seeing) -> None:
    sampler = seeing.sampler("a")

    async def scenario() -> None:
        turn = await sampler.sample([user(ONE, "?")], train=False)
        assert turn.pictures.encoded == (ONE,)

    asyncio.run(scenario())
    assert sampler.turns == []
    assert sampler.engines.asked[0][1] == PromptPictures((ONE,), ((1, 6),))


def test_a_run_of_text_asks_its_engines_without_pictures(seeing: Seeing) -> None:
    sampler = seeing.sampler("a", max_pictures=0)
    turns_of(sampler, [user("?")])
    assert sampler.engines.asked[0][1] is None


class Screens:
    """An environment that shows an image of PIL's after each answer."""

    async def run(self, task: Task, ctx: Any) -> None:
        messages: list[Any] = []
        for colour in ("red", "blue", "red"):
            messages.append({"role": "user", "content": [Image.new("RGB", (56, 28), colour), "What now?"]})
            turn = await ctx.sample(messages)
            messages.append(turn.message)
        ctx.reward(1.0)


def test_an_environment_shows_a_screen_after_each_move(seeing: Seeing) -> None:
    def make_sampler(sampling: Sampling) -> TurnSampler:
        return seeing.sampler("up", "down", "up")

    runner = AttemptRunner(Screens(), EnvironmentConfig(), make_sampler, AttemptKeys())
    attempt = asyncio.run(runner.attempt(Task("0", 0), Sampling()))
    columns = row_columns([attempt])
    (seen,), (ranges,) = columns["seen_pictures"], columns["seen_ranges"]
    assert (len(seen), len(set(seen))) == (3, 2)
    assert ranges.reshape(-1, 3)[:, [0, 2]].tolist() == [[0, 2]] * 3
    contents = [message["content"] for message in json.loads(columns["transcript"][0])]
    shown = [content[0] for content in contents if isinstance(content, list)]
    assert shown == [{"type": "image", "picture": number} for number in (0, 1, 0)]
    assert contents[1] == "up"


class Looks:
    """An environment with a tool that shows what it has found."""

    async def run(self, task: Task, ctx: Any) -> None:
        def look(where: str) -> list[Any]:
            """Look somewhere."""
            return [Image.new("RGB", (56, 28), "red"), f"This is {where}."]

        messages: list[Any] = [user("Where?")]
        turn = await ctx.sample(messages, tools=[look])
        await ctx.sample([*messages, turn.message, *await ctx.use_tools(turn, [look])], tools=[look])


def test_what_a_tool_shows_is_seen(seeing: Seeing) -> None:

    def make_sampler(sampling: Sampling) -> TurnSampler:
        call = '<tool_call>\n{"name": "look", "arguments": {"where": "here"}}\n</tool_call>'
        return seeing.sampler(call, "a wall")

    runner = AttemptRunner(Looks(), EnvironmentConfig(), make_sampler, AttemptKeys())
    attempt = asyncio.run(runner.attempt(Task("0", 0), Sampling()))
    assert attempt.outcome.kind == "completed", attempt.outcome.detail
    assert seeing.text(attempt.turns[1].prompt_ids).endswith(f"{START}{IMAGE * 2}{END}This is here.\n")
    assert len(attempt.turns[1].pictures.encoded) == 1


def test_families_of_the_renderers_refuse_pictures_at_the_start(seeing: Seeing) -> None:
    with pytest.raises(ConfigError, match=r"environment\.gateway\.format=qwen3: pictures are written by .* template"):
        make_format(seeing.tokenizer, GatewayConfig(format="qwen3"), sees=True)

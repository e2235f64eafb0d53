"""A session makes turns: whose tokens go on, within which limits, and what becomes of those that nobody waits for."""

import asyncio
import pickle
from typing import Any

import pytest

from penstock.workers.gateway.errors import AttemptOver, LimitReached, Rejected
from penstock.workers.gateway.session import turn_seed
from penstock.workers.protocols import Sampling
from penstock.workers.trajectory import segments_of
from tests.workers.gateway.chat_models import ADD, Saying, call_text, make_session, text_of

SYSTEM = {"role": "system", "content": "Count."}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def said(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def test_a_conversation_goes_on_with_the_tokens_that_were_sampled() -> None:
    async def scenario() -> None:
        session = make_session(Saying(["one", "two"]))
        first = await session.sample([user("a")])
        second = await session.sample([user("a"), said("one"), user("b")])
        assert second.parent == first.id
        assert text_of(second.prompt_ids) == (
            "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\none<|im_end|>\n"
            "<|im_start|>user\nb<|im_end|>\n<|im_start|>assistant\n"
        )
        assert len(segments_of(session.turns)) == 1
        assert [message["content"] for message in session.last_messages] == ["a", "one", "b", "two"]

    asyncio.run(scenario())


def test_tokens_that_say_the_same_in_another_way_are_kept() -> None:
    """The engine sampled a word as letters, where the tokenizer would write the word's one token."""

    async def scenario() -> None:
        engines = Saying(["x", "y"])
        session = make_session(engines)
        letters = [token for letter in "<think>" for token in session._form._encode(letter)]
        sample = engines.sample

        async def spelled(*arguments: Any) -> Any:
            completion = await sample(*arguments)
            ids = [*letters, *completion.token_ids]
            return type(completion)(ids, [-1.0] * len(ids), [0] * len(ids), "<think>x", "stop")

        engines.sample = spelled  # type: ignore[method-assign]
        first = await session.sample([user("a")])
        second = await session.sample([user("a"), first.message, user("b")])
        read = len(first.prompt_ids) + len(first.output_ids)
        assert second.prompt_ids[:read] == [*first.prompt_ids, *first.output_ids]
        assert second.parent == first.id

    asyncio.run(scenario())


def test_thinking_that_a_client_drops_stays_in_the_tokens() -> None:
    async def scenario() -> None:
        session = make_session(Saying(["<think>\nhm\n</think>\n\none", "two"]))
        first = await session.sample([user("a")])
        assert (first.message["reasoning_content"], first.message["content"]) == ("hm", "one")
        second = await session.sample([user("a"), said("one"), user("b")])
        assert second.parent == first.id
        assert "hm" in text_of(second.prompt_ids)

    asyncio.run(scenario())


def test_a_template_that_strips_thinking_begins_a_segment_only_with_a_question() -> None:
    async def scenario() -> None:
        call = "<think>\nhm\n</think>\n\n" + call_text("add", "{}")
        session = make_session(Saying([call, "<think>\nok\n</think>\n\none", "two"]), "strips")
        first = await session.sample([user("a")], [ADD])
        result = {"role": "tool", "tool_call_id": first.calls[0].id, "content": "4"}
        second = await session.sample([user("a"), first.message, result], [ADD])
        third = await session.sample([user("a"), first.message, result, second.message, user("b")], [ADD])
        assert (second.parent, third.parent) == (first.id, None)
        assert "hm" not in text_of(third.prompt_ids)
        assert len(segments_of(session.turns)) == 2
        assert session._counts["rewritten_by_template"] == 1

    asyncio.run(scenario())


def test_a_shorter_history_and_another_system_prompt_are_segments_of_their_own() -> None:
    async def scenario() -> None:
        session = make_session(Saying(["one", "two", "three", "four"]))
        await session.sample([user("a")])
        await session.sample([user("summary"), said("so far so good"), user("b")])
        await session.sample([SYSTEM, user("a")])
        fourth = await session.sample([user("a"), said("one"), user("c")])
        assert [turn.parent for turn in session.turns] == [None, None, None, 0]
        assert len(segments_of([*session.turns])) == 3
        assert session._counts["rewritten_by_client"] == 1
        assert fourth.id == 3

    asyncio.run(scenario())


def test_calls_side_by_side_are_turns_of_their_own() -> None:
    async def scenario() -> None:
        engines = Saying(["one", "two", "three", "four"])
        session = make_session(engines)
        first, second = await asyncio.gather(session.sample([user("a")]), session.sample([user("a")]))
        assert [first.message["content"], second.message["content"]] == ["one", "two"]
        goes_on = [[user("a"), turn.message, user("b")] for turn in (first, second)]
        third, fourth = await asyncio.gather(*map(session.sample, goes_on))
        assert (third.parent, fourth.parent) == (first.id, second.id)
        segments = segments_of(session.turns)
        assert sorted(len(segment.runs) for segment in segments) == [2, 2]

    asyncio.run(scenario())


def test_a_turn_whose_asker_goes_away_is_in_no_history() -> None:
    async def scenario() -> None:
        engines = Saying(["one", "two"])
        session = make_session(engines, max_turns=1)
        engines.open.clear()
        asking = asyncio.ensure_future(session.sample([user("a")]))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        assert (session.turns, engines.num_cancelled, session._counts["turns_abandoned"]) == ([], 1, 1)
        engines.open.set()
        turn = await session.sample([user("a")])  # nor does it count as one of the attempt's
        assert [turn] == session.turns

    asyncio.run(scenario())


def test_a_forgotten_turn_is_sampled_again() -> None:
    async def scenario() -> None:
        session = make_session(Saying(["one", "two"]))
        session.forget(await session.sample([user("a")]))
        assert session.turns == []
        turn = await session.sample([user("a")], is_retry=True)
        assert turn.message["content"] == "two"

    asyncio.run(scenario())


def test_a_retry_gets_the_turn_of_the_same_request() -> None:
    async def scenario() -> None:
        session = make_session(Saying(["one", "two"]), max_turns=2)
        first = await session.sample([user("a")], temperature=0.5)
        assert await session.sample([user("a")], is_retry=True, temperature=0.5) is first
        other = await session.sample([user("a")], is_retry=True, temperature=0.7)
        assert other is not first
        with pytest.raises(LimitReached):
            await session.sample([user("b")])
        assert await session.sample([user("a")], is_retry=True, temperature=0.7) is other
        assert len(session.turns) == 2

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "options",
    [
        {"stop": ""}, {"stop": ["\ud800"]}, {"stop": 5}, {"top_p": 0}, {"temperature": -1}, {"top_k": 10**30},
        {"max_tokens": "many"}, {"structure": {"regex": "\ud800"}},
    ],
)  # fmt: skip
def test_a_request_that_no_engine_can_take_is_refused_before_one_is_asked(options: dict[str, Any]) -> None:
    async def scenario() -> None:
        engines = Saying(["one"])
        session = make_session(engines)
        for train in (True, False):
            with pytest.raises(ValueError, match=f"^{next(iter(options))}="):
                await session.sample([user("a")], train=train, **options)
        with pytest.raises(ValueError, match=r"temprature: .* did you mean 'temperature'"):
            await session.sample([user("a")], temprature=1)
        assert engines.prompts == []
        assert (await session.sample([user("a")])).text == "one"

    asyncio.run(scenario())


def test_limits_of_turns_and_tokens_end_the_attempt() -> None:
    async def scenario() -> None:
        session = make_session(Saying(["one"]), max_turns=1)
        await session.sample([user("a")])
        for _ in range(2):
            with pytest.raises(LimitReached, match=r"environment\.max_turns") as error:
                await session.sample([user("b")])
        assert (error.value.limit, session.limit) == ("turns", "turns")

        session = make_session(Saying(["one", "two"]), max_tokens=6)  # "one" is four with its end
        await session.sample([user("a")])
        second = await session.sample([user("a")])
        assert (text_of(second.output_ids), second.finish) == ("tw", "length")
        with pytest.raises(LimitReached, match=r"environment\.max_tokens"):
            await session.sample([user("a")])
        assert session.limit == "tokens"

    asyncio.run(scenario())


def test_a_conversation_that_is_too_long_may_go_on_shorter() -> None:
    async def scenario() -> None:
        session = make_session(Saying(["one", "two"]), max_model_len=100)
        with pytest.raises(LimitReached, match=r"rollout\.max_model_len=100") as error:
            await session.sample([user("a" * 100)])
        assert (error.value.limit, session.limit) == ("context", "context")
        turn = await session.sample([user("a")])
        assert (session.limit, session.turns) == ("", [turn])

    asyncio.run(scenario())


def test_an_answer_has_the_room_that_the_context_leaves() -> None:
    async def scenario() -> None:
        engines = Saying(["a long answer"])
        session = make_session(engines, max_model_len=30)
        turn = await session.sample([user("a")])
        assert len(turn.prompt_ids) + engines.samplings[0].max_tokens == 30
        assert turn.finish == "length"
        assert len(turn.output_ids) == engines.samplings[0].max_tokens

    asyncio.run(scenario())


def test_an_answer_that_was_cut_short_goes_on_with_its_tokens() -> None:
    async def scenario() -> None:
        session = make_session(Saying(["abcdef", "ghi"]))
        first = await session.sample([user("a")], max_tokens=3)
        second = await session.sample([user("a"), said("abc"), user("more")])
        read = len(first.prompt_ids) + len(first.output_ids)
        assert second.parent == first.id
        assert text_of(second.prompt_ids[read:]).startswith("<|im_end|>\n<|im_start|>user\nmore")

    asyncio.run(scenario())


def test_the_end_of_an_attempt_gives_up_what_is_under_way() -> None:
    async def scenario() -> None:
        engines = Saying(["one", "two"])
        session = make_session(engines)
        engines.open.clear()
        asking = [asyncio.ensure_future(session.sample([user("a")], train=train)) for train in (True, False)]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        session.end(AttemptOver("the attempt has ended"))
        for one in asking:
            with pytest.raises(AttemptOver, match="has ended"):
                await one
        assert (session.turns, engines.num_cancelled) == ([], 2)
        with pytest.raises(AttemptOver):
            await session.sample([user("a")])

    asyncio.run(scenario())


def test_who_is_cancelled_at_the_end_of_an_attempt_stays_cancelled() -> None:
    async def scenario() -> None:
        engines = Saying(["one"])
        session = make_session(engines)
        engines.open.clear()
        asking = asyncio.ensure_future(session.sample([user("a")]))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        session.end(AttemptOver("the attempt has ended"))
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking

    asyncio.run(scenario())


def test_an_opponents_turns_are_not_trained_and_count_for_no_limit() -> None:
    async def scenario() -> None:
        session = make_session(Saying(["one", "two"]), max_turns=1)
        aside = await session.sample([user("a")], train=False)
        assert (aside.message["content"], session.turns) == ("one", [])
        turn = await session.sample([user("a")])
        assert session.turns == [turn]

    asyncio.run(scenario())


def test_each_turn_has_a_seed_of_its_own_that_depends_on_the_attempts_alone() -> None:
    async def scenario() -> None:
        engines = Saying(["one"] * 3)
        session = make_session(engines, sampling=Sampling(seed=5))
        for _ in range(2):
            await session.sample([user("a")])
        await session.sample([user("a")], train=False)
        assert [sampling.seed for sampling in engines.samplings] == [5, turn_seed(5, 1), turn_seed(5, -1)]
        assert len({sampling.seed for sampling in engines.samplings}) == 3

    asyncio.run(scenario())


def test_a_call_that_cannot_be_read_is_a_problem_of_a_turn_that_goes_on() -> None:
    async def scenario() -> None:
        session = make_session(Saying([call_text("subtract", "{}"), "sorry"]))
        first = await session.sample([user("a")], [ADD])
        assert (list(first.calls), first.problem) == ([], "There is no tool 'subtract'. There are: add.")
        assert first.message["content"] == call_text("subtract", "{}")
        second = await session.sample([user("a"), first.message, user(first.problem)], [ADD])
        assert second.parent == first.id
        assert session._counts["calls_unreadable"] == 1

    asyncio.run(scenario())


def test_why_an_attempt_gets_no_more_turns_crosses_processes() -> None:
    limit = pickle.loads(pickle.dumps(LimitReached("turns", "no more")))
    assert (limit.limit, str(limit)) == ("turns", "no more")
    rejected = pickle.loads(pickle.dumps(Rejected("refused", "it did")))
    assert (rejected.reason, str(rejected)) == ("refused", "it did")
    assert str(pickle.loads(pickle.dumps(AttemptOver("over")))) == "over"


def test_turns_that_the_trainer_cannot_compute_at_a_temperature_are_counted() -> None:
    """`ctx.sample` may choose, whatever clients may."""

    async def scenario() -> None:
        session = make_session(Saying(["x"] * 6))
        asked: list[dict[str, Any]] = [
            {"temperature": 0.5}, {"temperature": 0.0}, {"temperature": 0.0, "top_k": 1}, {"top_p": 0.9},
            {"structure": {"regex": "x"}}, {"top_p": 1.0},
        ]  # fmt: skip
        for options in asked:
            await session.sample([user("a")], **options)
        counts = [session._counts[f"turns_{kind}"] for kind in ("greedy", "narrowed", "structured")]
        assert counts == [2, 1, 1]
        assert [turn.temperature for turn in session.turns] == [0.5, 1.0, 1.0, 1.0, 1.0, 1.0]

    asyncio.run(scenario())

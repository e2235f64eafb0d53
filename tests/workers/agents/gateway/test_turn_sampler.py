"""A sampler makes turns: whose tokens go on, within which limits, and what becomes of those that nobody waits for."""

import asyncio
import pickle
from typing import Any

import pytest

from penstock.conf.errors import AttemptOver, LimitReached, Rejected, SamplingError
from penstock.workers.agents.gateway.turn_sampler import turn_seed
from penstock.workers.agents.trajectory import segments_of
from penstock.workers.protocols import Sampling
from tests.workers.agents.gateway.chat_models import ADD, Saying, call_text, make_sampler, text_of, tokenizer

SYSTEM = {"role": "system", "content": "Count."}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def said(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def test_a_conversation_goes_on_with_the_tokens_that_were_sampled() -> None:
    async def scenario() -> None:
        sampler = make_sampler(Saying(["one", "two"]))
        first = await sampler.sample([user("a")])
        second = await sampler.sample([user("a"), said("one"), user("b")])
        assert second.parent == first.id
        assert text_of(second.prompt_ids) == (
            "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\none<|im_end|>\n"
            "<|im_start|>user\nb<|im_end|>\n<|im_start|>assistant\n"
        )
        assert len(segments_of(sampler.turns)) == 1
        assert [message["content"] for message in sampler.last_messages[""]] == ["a", "one", "b", "two"]

    asyncio.run(scenario())


def test_the_time_between_turns_is_counted_once() -> None:
    async def scenario() -> None:
        sampler = make_sampler(Saying(["one", "two", "three", "four", "five"]))
        await sampler.sample([user("a")])
        assert sampler.counts["waited_ms"] == 0
        await asyncio.sleep(0.03)
        await asyncio.gather(sampler.sample([user("a"), said("one"), user("b")]), sampler.sample([user("c")]))
        waited_ms = sampler.counts["waited_ms"]
        assert waited_ms >= 29
        await asyncio.gather(sampler.sample([user("d")]), sampler.sample([user("e")]))
        assert sampler.counts["waited_ms"] - waited_ms < waited_ms, "nothing was waited for"

    asyncio.run(scenario())


def test_a_turn_never_continues_one_of_another_policy() -> None:
    async def scenario() -> None:
        engines = Saying(["one", "two", "three", "four"])
        sampler = make_sampler(engines, sampling=Sampling(seed=5), policies=["solver", "proposer"])
        first = await sampler.sample([user("a")])
        other = await sampler.sample([user("a"), said("one"), user("b")], policy="proposer")
        third = await sampler.sample([user("a"), said("one"), user("b")])
        await sampler.sample([user("a"), said("one"), user("b"), said("two"), user("c")], policy="proposer")
        assert [turn.parent for turn in sampler.turns] == [None, None, first.id, other.id]
        assert [turn.policy for turn in sampler.turns] == ["solver", "proposer"] * 2
        assert sampler.counts["rewritten_by_client"] == 0
        assert [sampling.policy for sampling in engines.samplings] == ["solver", "proposer"] * 2
        assert len({sampling.seed for sampling in engines.samplings}) == 4
        contents = {name: [one["content"] for one in told] for name, told in sampler.last_messages.items()}
        assert contents == {"solver": ["a", "one", "b", "three"], "proposer": ["a", "one", "b", "two", "c", "four"]}
        sampler.forget(third)
        assert [turn.text for turn in sampler.turns] == ["one", "two", "four"]

    asyncio.run(scenario())


def test_an_unknown_policy_is_refused_and_the_one_may_be_named() -> None:
    async def scenario() -> None:
        sampler = make_sampler(Saying(["one", "two"]), policies=["solver", "proposer"])
        with pytest.raises(SamplingError, match="did you mean 'proposer'"):
            await sampler.sample([user("a")], policy="propser")
        assert (await sampler.sample([user("a")], train=False, policy="proposer")).policy == "proposer"
        assert sampler.turns == []
        engines = Saying(["one"])
        alone = make_sampler(engines, policies=["solver"])
        assert (await alone.sample([user("a")], policy="solver")).policy == engines.samplings[0].policy == ""
        with pytest.raises(SamplingError, match="Known: solver"):
            await alone.sample([user("a")], policy="proposer")

    asyncio.run(scenario())


def test_tokens_that_say_the_same_in_another_way_are_kept() -> None:
    """The engine sampled a word as letters, where the tokenizer would write the word's one token."""

    async def scenario() -> None:
        engines = Saying(["x", "y"])
        sampler = make_sampler(engines)
        letters = [token for letter in "<think>" for token in tokenizer().encode(letter, add_special_tokens=False)]
        sample = engines.sample

        async def spelled(*arguments: Any) -> Any:
            completion = await sample(*arguments)
            ids = [*letters, *completion.token_ids]
            return type(completion)(ids, [-1.0] * len(ids), [0] * len(ids), "<think>x", "stop")

        engines.sample = spelled  # type: ignore[method-assign]
        first = await sampler.sample([user("a")])
        second = await sampler.sample([user("a"), first.message, user("b")])
        read = len(first.prompt_ids) + len(first.output_ids)
        assert second.prompt_ids[:read] == [*first.prompt_ids, *first.output_ids]
        assert second.parent == first.id

    asyncio.run(scenario())


def test_thinking_that_a_client_drops_stays_in_the_tokens() -> None:
    async def scenario() -> None:
        sampler = make_sampler(Saying(["<think>\nhm\n</think>\n\none", "two"]))
        first = await sampler.sample([user("a")])
        assert (first.message["reasoning_content"], first.message["content"]) == ("hm", "one")
        second = await sampler.sample([user("a"), said("one"), user("b")])
        assert second.parent == first.id
        assert "hm" in text_of(second.prompt_ids)

    asyncio.run(scenario())


def test_a_template_that_strips_thinking_begins_a_segment_only_with_a_question() -> None:
    async def scenario() -> None:
        call = "<think>\nhm\n</think>\n\n" + call_text("add", "{}")
        sampler = make_sampler(Saying([call, "<think>\nok\n</think>\n\none", "two"]), "strips")
        first = await sampler.sample([user("a")], [ADD])
        result = {"role": "tool", "tool_call_id": first.calls[0].id, "content": "4"}
        second = await sampler.sample([user("a"), first.message, result], [ADD])
        third = await sampler.sample([user("a"), first.message, result, second.message, user("b")], [ADD])
        assert (second.parent, third.parent) == (first.id, None)
        assert "hm" not in text_of(third.prompt_ids)
        assert len(segments_of(sampler.turns)) == 2
        assert sampler.counts["rewritten_by_template"] == 1

    asyncio.run(scenario())


def test_a_shorter_history_and_another_system_prompt_are_segments_of_their_own() -> None:
    async def scenario() -> None:
        sampler = make_sampler(Saying(["one", "two", "three", "four"]))
        await sampler.sample([user("a")])
        await sampler.sample([user("summary"), said("so far so good"), user("b")])
        await sampler.sample([SYSTEM, user("a")])
        fourth = await sampler.sample([user("a"), said("one"), user("c")])
        assert [turn.parent for turn in sampler.turns] == [None, None, None, 0]
        assert len(segments_of([*sampler.turns])) == 3
        assert sampler.counts["rewritten_by_client"] == 1
        assert fourth.id == 3

    asyncio.run(scenario())


def test_calls_side_by_side_are_turns_of_their_own() -> None:
    async def scenario() -> None:
        engines = Saying(["one", "two", "three", "four"])
        sampler = make_sampler(engines)
        first, second = await asyncio.gather(sampler.sample([user("a")]), sampler.sample([user("a")]))
        assert [first.message["content"], second.message["content"]] == ["one", "two"]
        goes_on = [[user("a"), turn.message, user("b")] for turn in (first, second)]
        third, fourth = await asyncio.gather(*map(sampler.sample, goes_on))
        assert (third.parent, fourth.parent) == (first.id, second.id)
        segments = segments_of(sampler.turns)
        assert sorted(len(segment.runs) for segment in segments) == [2, 2]

    asyncio.run(scenario())


def test_a_turn_whose_asker_goes_away_is_in_no_history() -> None:
    async def scenario() -> None:
        engines = Saying(["one", "two"])
        sampler = make_sampler(engines, max_turns=1)
        engines.open.clear()
        asking = asyncio.ensure_future(sampler.sample([user("a")]))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        assert (sampler.turns, engines.num_cancelled, sampler.counts["turns_abandoned"]) == ([], 1, 1)
        engines.open.set()
        turn = await sampler.sample([user("a")])  # nor does it count as one of the attempt's
        assert [turn] == sampler.turns

    asyncio.run(scenario())


def test_a_forgotten_turn_is_sampled_again() -> None:
    async def scenario() -> None:
        sampler = make_sampler(Saying(["one", "two"]))
        sampler.forget(await sampler.sample([user("a")]))
        assert sampler.turns == []
        turn = await sampler.sample([user("a")], is_retry=True)
        assert turn.message["content"] == "two"

    asyncio.run(scenario())


def test_a_retry_gets_the_turn_of_the_same_request() -> None:
    async def scenario() -> None:
        sampler = make_sampler(Saying(["one", "two"]), max_turns=2)
        first = await sampler.sample([user("a")], temperature=0.5)
        assert await sampler.sample([user("a")], is_retry=True, temperature=0.5) is first
        other = await sampler.sample([user("a")], is_retry=True, temperature=0.7)
        assert other is not first
        with pytest.raises(LimitReached):
            await sampler.sample([user("b")])
        assert await sampler.sample([user("a")], is_retry=True, temperature=0.7) is other
        assert len(sampler.turns) == 2

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
        sampler = make_sampler(engines)
        for train in (True, False):
            with pytest.raises(ValueError, match=f"^{next(iter(options))}="):
                await sampler.sample([user("a")], train=train, **options)
        with pytest.raises(ValueError, match=r"temprature: .* did you mean 'temperature'"):
            await sampler.sample([user("a")], temprature=1)
        assert engines.prompts == []
        assert (await sampler.sample([user("a")])).text == "one"

    asyncio.run(scenario())


def test_limits_of_turns_and_tokens_end_the_attempt() -> None:
    async def scenario() -> None:
        sampler = make_sampler(Saying(["one"]), max_turns=1)
        await sampler.sample([user("a")])
        for _ in range(2):
            with pytest.raises(LimitReached, match=r"environment\.max_turns") as error:
                await sampler.sample([user("b")])
        assert (error.value.limit, sampler.limit) == ("turns", "turns")

        sampler = make_sampler(Saying(["one", "two"]), max_tokens=6)  # "one" is four with its end
        await sampler.sample([user("a")])
        second = await sampler.sample([user("a")])
        assert (text_of(second.output_ids), second.finish) == ("tw", "length")
        with pytest.raises(LimitReached, match=r"environment\.max_tokens"):
            await sampler.sample([user("a")])
        assert sampler.limit == "tokens"

    asyncio.run(scenario())


def test_a_conversation_that_is_too_long_may_go_on_shorter() -> None:
    async def scenario() -> None:
        sampler = make_sampler(Saying(["one", "two"]), max_model_len=100)
        with pytest.raises(LimitReached, match=r"rollout\.max_model_len=100") as error:
            await sampler.sample([user("a" * 100)])
        assert (error.value.limit, sampler.limit) == ("context", "context")
        turn = await sampler.sample([user("a")])
        assert (sampler.limit, sampler.turns) == ("", [turn])

    asyncio.run(scenario())


def test_an_answer_has_the_room_that_the_context_leaves() -> None:
    async def scenario() -> None:
        engines = Saying(["a long answer"])
        sampler = make_sampler(engines, max_model_len=30)
        turn = await sampler.sample([user("a")])
        assert len(turn.prompt_ids) + engines.samplings[0].max_tokens == 30
        assert turn.finish == "length"
        assert len(turn.output_ids) == engines.samplings[0].max_tokens

    asyncio.run(scenario())


def test_an_answer_that_was_cut_short_goes_on_with_its_tokens() -> None:
    async def scenario() -> None:
        sampler = make_sampler(Saying(["abcdef", "ghi"]))
        first = await sampler.sample([user("a")], max_tokens=3)
        second = await sampler.sample([user("a"), said("abc"), user("more")])
        read = len(first.prompt_ids) + len(first.output_ids)
        assert second.parent == first.id
        assert text_of(second.prompt_ids[read:]).startswith("<|im_end|>\n<|im_start|>user\nmore")

    asyncio.run(scenario())


def test_the_end_of_an_attempt_gives_up_what_is_under_way() -> None:
    async def scenario() -> None:
        engines = Saying(["one", "two"])
        sampler = make_sampler(engines)
        engines.open.clear()
        asking = [asyncio.ensure_future(sampler.sample([user("a")], train=train)) for train in (True, False)]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        sampler.end(AttemptOver("the attempt has ended"))
        for one in asking:
            with pytest.raises(AttemptOver, match="has ended"):
                await one
        assert (sampler.turns, engines.num_cancelled) == ([], 2)
        with pytest.raises(AttemptOver):
            await sampler.sample([user("a")])

    asyncio.run(scenario())


def test_who_is_cancelled_at_the_end_of_an_attempt_stays_cancelled() -> None:
    async def scenario() -> None:
        engines = Saying(["one"])
        sampler = make_sampler(engines)
        engines.open.clear()
        asking = asyncio.ensure_future(sampler.sample([user("a")]))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        sampler.end(AttemptOver("the attempt has ended"))
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking

    asyncio.run(scenario())


def test_an_opponents_turns_are_not_trained_and_count_for_no_limit() -> None:
    async def scenario() -> None:
        sampler = make_sampler(Saying(["one", "two"]), max_turns=1)
        aside = await sampler.sample([user("a")], train=False)
        assert (aside.message["content"], sampler.turns) == ("one", [])
        turn = await sampler.sample([user("a")])
        assert sampler.turns == [turn]

    asyncio.run(scenario())


def test_each_turn_has_a_seed_of_its_own_that_depends_on_the_attempts_alone() -> None:
    async def scenario() -> None:
        engines = Saying(["one"] * 3)
        sampler = make_sampler(engines, sampling=Sampling(seed=5))
        for _ in range(2):
            await sampler.sample([user("a")])
        await sampler.sample([user("a")], train=False)
        assert [sampling.seed for sampling in engines.samplings] == [5, turn_seed(5, 1), turn_seed(5, -1)]
        assert len({sampling.seed for sampling in engines.samplings}) == 3

    asyncio.run(scenario())


def test_a_call_that_cannot_be_read_is_a_problem_of_a_turn_that_goes_on() -> None:
    async def scenario() -> None:
        sampler = make_sampler(Saying([call_text("subtract", "{}"), "sorry"]))
        first = await sampler.sample([user("a")], [ADD])
        assert (list(first.calls), first.problem) == ([], "There is no tool 'subtract'. There are: add.")
        assert first.message["content"] == call_text("subtract", "{}")
        second = await sampler.sample([user("a"), first.message, user(first.problem)], [ADD])
        assert second.parent == first.id
        assert sampler.counts["calls_unreadable"] == 1

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
        sampler = make_sampler(Saying(["x"] * 6))
        asked: list[dict[str, Any]] = [
            {"temperature": 0.5}, {"temperature": 0.0}, {"temperature": 0.0, "top_k": 1}, {"top_p": 0.9},
            {"structure": {"regex": "x"}}, {"top_p": 1.0},
        ]  # fmt: skip
        for options in asked:
            await sampler.sample([user("a")], **options)
        counts = [sampler.counts[f"turns_{kind}"] for kind in ("greedy", "narrowed", "structured")]
        assert counts == [2, 1, 1]
        assert [turn.temperature for turn in sampler.turns] == [0.5, 1.0, 1.0, 1.0, 1.0, 1.0]

    asyncio.run(scenario())

"""The engine that samples a turn, and what becomes of a turn whose engine dies."""

import asyncio
import gc
import weakref

import pytest

from penstock.conf.errors import DataError, DeadlineExceeded
from penstock.workers.agents.gateway.engine_pool import SLACK, EnginePool
from penstock.workers.protocols import Sampling
from tests.workers.agents.gateway.chat_models import Dying, make_sampler


class Conversation:
    """Whatever asks."""


USER = [{"role": "user", "content": "a"}]


def test_a_turn_whose_engine_dies_is_sampled_again_by_another() -> None:
    async def scenario() -> None:
        call = Dying()
        pool = EnginePool(call, 60.0)
        pool.update({"a": "a", "b": "b"})
        call.dead = {"a"}
        turn = await make_sampler(pool).sample(USER)
        assert (turn.text, call.asked, pool.num_again) == ("b", ["a", "b"], 1)

    asyncio.run(scenario())


def test_a_turn_waits_for_the_engine_that_takes_the_place_of_the_last_one() -> None:
    async def scenario() -> None:
        call = Dying()
        pool = EnginePool(call, 60.0)
        pool.update({"a": "a"})
        call.dead = {"a"}
        sampling = asyncio.ensure_future(pool.sample([1], Sampling(), Conversation()))
        while not pool.num_again:
            await asyncio.sleep(0)
        pool.update({"a": "another"})
        assert (await asyncio.wait_for(sampling, 30)).text == "another"

    asyncio.run(scenario())


def test_a_turn_waits_until_there_is_an_engine_and_no_longer_than_it_may() -> None:
    async def scenario() -> None:
        pool = EnginePool(Dying(), 60.0)
        sampling = asyncio.ensure_future(pool.sample([1], Sampling(), Conversation()))
        await asyncio.sleep(0)
        pool.update({"a": "a"})
        assert (await asyncio.wait_for(sampling, 30)).text == "a"
        with pytest.raises(DeadlineExceeded, match="no engine was there"):
            await EnginePool(Dying(), 0.01).sample([1], Sampling(), Conversation())

    asyncio.run(scenario())


def test_an_engine_that_does_not_answer_is_named() -> None:
    async def scenario() -> None:
        call = Dying()
        call.open.clear()
        pool = EnginePool(call, 0.01)
        pool.update({"Rollout-0": "a"})
        with pytest.raises(DeadlineExceeded, match=r"Rollout-0 .*rollout\.generate_timeout_s"):
            await pool.sample([1], Sampling(), Conversation())
        assert pool.load("Rollout-0") == 0

    asyncio.run(scenario())


def test_a_conversation_stays_with_its_prefix_unless_others_have_far_less_to_do() -> None:
    async def scenario() -> None:
        call = Dying()
        pool = EnginePool(call, 60.0)
        pool.update({"a": "a", "b": "b"})
        one = Conversation()
        await pool.sample([1], Sampling(), one)
        call.open.clear()
        others = [asyncio.ensure_future(pool.sample([1], Sampling(), Conversation())) for index in range(2 * SLACK)]
        await asyncio.sleep(0)
        assert [call.asked.count(name) for name in "ab"] == [SLACK + 1, SLACK]
        own = asyncio.ensure_future(pool.sample([1], Sampling(), one))
        await asyncio.sleep(0)
        assert call.asked[-1] == "a"  # as much to do as the other: it has the prefix
        call.open.set()
        await asyncio.gather(own, *others)

        call.open.clear()
        busy = [asyncio.ensure_future(pool.sample([1], Sampling(), one)) for _ in range(SLACK + 2)]
        await asyncio.sleep(0)
        assert call.asked[-SLACK - 2 :] == ["a"] * (SLACK + 1) + ["b"]
        call.open.set()
        await asyncio.gather(*busy)

    asyncio.run(scenario())


def test_what_an_engine_refuses_is_not_asked_again() -> None:
    async def scenario() -> None:
        asked = []

        async def refuses(*arguments: object) -> None:
            asked.append(arguments)
            raise DataError("no")

        pool = EnginePool(refuses, 60.0)  # type: ignore[arg-type]
        pool.update({"a": "a", "b": "b"})
        with pytest.raises(DataError):
            await pool.sample([1], Sampling(), Conversation())
        assert (len(asked), pool.num_again) == (1, 0)

    asyncio.run(scenario())


def test_a_conversation_that_is_gone_is_forgotten() -> None:
    async def scenario() -> None:
        pool = EnginePool(Dying(), 60.0)
        pool.update({"a": "a"})
        sampler = make_sampler(pool)
        await sampler.sample(USER)
        gone = weakref.ref(sampler)
        assert len(pool.engine_of) == 1
        del sampler
        gc.collect()
        assert gone() is None
        assert len(pool.engine_of) == 0

    asyncio.run(scenario())


def test_a_turn_goes_to_the_engines_of_its_policy() -> None:
    async def scenario() -> None:
        call = Dying()
        pool = EnginePool(call, 60.0, policies={"a": "solver", "b": "proposer", "c": "solver", "d": "proposer"})
        pool.update({name: name for name in "abcd"})
        conversation = Conversation()
        for policy, name in [("solver", "a"), ("proposer", "b"), ("solver", "a"), ("proposer", "b")]:
            assert (await pool.sample([1], Sampling(policy=policy), conversation)).text == name
        call.dead = {"b"}
        assert (await pool.sample([1], Sampling(policy="proposer"), conversation)).text == "d"
        assert (await pool.sample([1], Sampling(policy="proposer"), conversation)).text == "d"

    asyncio.run(scenario())


def test_a_turn_waits_for_an_engine_of_its_policy_where_others_are_there() -> None:
    async def scenario() -> None:
        pool = EnginePool(Dying(), 60.0, policies={"a": "solver", "b": "proposer"})
        pool.update({"a": "a"})
        sampling = asyncio.ensure_future(pool.sample([1], Sampling(policy="proposer"), Conversation()))
        await asyncio.sleep(0)
        pool.update({"a": "a", "b": "b"})
        assert (await asyncio.wait_for(sampling, 30)).text == "b"
        with pytest.raises(DeadlineExceeded, match="no engine of policy judge was there"):
            await EnginePool(Dying(), 0.01, policies={"a": "solver"}).sample(
                [1], Sampling(policy="judge"), Conversation()
            )

    asyncio.run(scenario())

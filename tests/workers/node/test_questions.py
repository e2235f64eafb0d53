"""Questions wait for who can answer them; an agent tells what actors of its node say, and of nobody else anything."""

import asyncio

from penstock.workers.node.node_actor import ActorDirectory, Mailbox
from tests.fakes.actors import FakeHandle, never


def test_who_asks_hears_its_own_answer_in_whatever_order_they_come() -> None:
    async def body() -> None:
        mailbox = Mailbox()
        asking = [asyncio.ensure_future(mailbox.ask(f"question {number}")) for number in range(3)]
        taken = [await mailbox.take() for _ in range(3)]
        assert [question for _, question in taken] == ["question 0", "question 1", "question 2"]
        for number, question in reversed(taken):
            mailbox.answer(number, f"answer to {question}")
        assert await asyncio.gather(*asking) == [f"answer to question {number}" for number in range(3)]

    asyncio.run(body())


def test_questions_come_to_who_waits_for_them_last() -> None:
    """Another process drives the run; the one before may be gone, and cannot say so."""

    async def body() -> None:
        mailbox = Mailbox()
        before, after = (asyncio.create_task(mailbox.take()) for _ in range(2))
        await asyncio.sleep(0)
        asking = asyncio.create_task(mailbox.ask("who is there?"))
        number, question = await asyncio.wait_for(after, 5)
        assert question == "who is there?"
        assert before.cancelled()
        mailbox.answer(number, "the second")
        assert await asking == "the second"

    asyncio.run(body())


def test_an_asker_that_left_gets_no_answer_and_one_that_waits_hears_of_the_end() -> None:
    async def body() -> None:
        mailbox = Mailbox()
        gone, waits = (asyncio.ensure_future(mailbox.ask(number)) for number in range(2))
        first, _ = await mailbox.take()
        gone.cancel()
        await asyncio.sleep(0)
        mailbox.answer(first, "too late")
        mailbox.close()
        assert await waits is None

    asyncio.run(body())


def test_who_is_silent_fails_or_is_not_known_is_left_out() -> None:
    node_actors = ActorDirectory()
    answers = {"A": "a", "B": ValueError("b"), "C": never, "D": "d"}
    node_actors.set({name: FakeHandle(progress=answer) for name, answer in answers.items()})
    found = asyncio.run(node_actors.ask("progress", ["A", "B", "C", "E"], 0.1))
    assert found == {"A": "a"}
    assert asyncio.run(node_actors.ask("progress", [], 0.1)) == {}


def test_those_that_were_met_last_are_asked() -> None:
    node_actors = ActorDirectory()
    node_actors.set({"A": FakeHandle(progress="before"), "B": FakeHandle(progress="b")})
    node_actors.set({"A": FakeHandle(progress="now")})
    assert asyncio.run(node_actors.ask("progress", ["A", "B"], 5.0)) == {"A": "now"}

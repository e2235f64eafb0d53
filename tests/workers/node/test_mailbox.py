"""Questions wait for who can answer them."""

import asyncio

from penstock.workers.node.mailbox import Mailbox


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


def test_who_has_gone_is_answered_to_nobody_and_who_waits_at_the_end_hears_of_it() -> None:
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

"""The loop of a run: in a notebook's cell, too; its end waits for threads that hang for so long and no longer."""

import asyncio
import signal
import threading

import pytest

import penstock
from penstock.conf.errors import DataError
from penstock.conf.run import RunConfig
from penstock.orchestrator import run as runs
from penstock.orchestrator.control import process


def test_a_thread_that_hangs_keeps_no_loop_from_its_end_and_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "LEAVE_S", 0.2)
    began, answers, threads = threading.Event(), threading.Event(), []

    def hang() -> None:
        threads.append(threading.current_thread())
        began.set()
        answers.wait(600)

    async def main() -> None:
        hanging = asyncio.ensure_future(asyncio.to_thread(hang))
        while not began.is_set():
            await asyncio.sleep(0.01)
        assert not hanging.done()
        raise ConnectionError("the run returns")

    with pytest.raises(ConnectionError, match="the run returns"):
        process.run(main())
    assert threads[0].is_alive()
    assert threads[0].daemon
    answers.set()
    threads[0].join(60)
    assert not threads[0].is_alive()


def test_what_ends_soon_is_waited_for_and_its_result_and_errors_are_its_callers() -> None:
    written = []

    def write() -> int:
        began.set()
        written.append(threading.current_thread().name)
        return 7

    async def main() -> int:
        assert await asyncio.to_thread(write) == 7
        with pytest.raises(ZeroDivisionError):
            await asyncio.to_thread(lambda: 1 // 0)
        began.clear()
        last = asyncio.ensure_future(asyncio.to_thread(write))
        await asyncio.sleep(0)
        assert not last.cancelled()
        return 3

    began = threading.Event()
    assert process.run(main()) == 3
    assert written == ["run", "run"]


def test_work_ends_with_what_a_check_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "CHECKS_S", 0.01)
    ended = []

    async def main() -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            ended.append("in order")
            raise ValueError("a consequence")

    def check() -> None:
        raise ConnectionError("nobody is there")

    with pytest.raises(ConnectionError, match="nobody is there"):
        process.run(main(), check)
    assert ended == ["in order"]


def test_an_interrupt_is_one_whatever_else_fails_with_it() -> None:
    async def main() -> None:
        asyncio.get_running_loop().call_soon(signal.raise_signal, signal.SIGINT)
        try:
            await asyncio.sleep(3600)
        finally:
            raise ConnectionError("the actors have ended, too")

    with pytest.raises(KeyboardInterrupt):
        process.run(main())


def test_a_call_within_a_running_loop_has_loops_of_its_own() -> None:
    async def cell() -> tuple[int, bool]:
        outer = asyncio.get_running_loop()
        with process.own_event_loop():
            found = asyncio.run(asyncio.sleep(0, 7))
        await asyncio.sleep(0)
        return found, asyncio.get_running_loop() is outer

    assert asyncio.run(cell()) == (7, True)


def test_a_cell_of_a_notebook_can_call_run_as_it_calls_train(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first step of a run that has a loop of its own stands for all others."""

    def resolve(*_: object) -> None:
        raise DataError(f"the loop gave {asyncio.run(asyncio.sleep(0, 7))}")

    monkeypatch.setattr(runs, "resolve", resolve)

    async def cell() -> None:
        for call in (lambda: penstock.run(RunConfig()), lambda: penstock.train(name="cell")):
            with pytest.raises(DataError, match="the loop gave 7"):
                call()
        await asyncio.sleep(0)  # the kernel's loop goes on

    asyncio.run(cell())

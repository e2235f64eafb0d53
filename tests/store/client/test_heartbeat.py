"""Leases live as long as their owner's process does, whatever its event loop is blocked by; and no longer."""

import asyncio
import contextlib
import gc
import logging
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.conf.errors import WorkerDied
from penstock.store.client.heartbeat import Heartbeat
from penstock.store.client.store_client import StoreClient
from penstock.store.data.segments import Segments
from penstock.store.errors import StoreError
from penstock.store.service.store import Store
from penstock.store.service.store_server import Endpoint
from tests.store.driver import make_spec
from tests.store.players import group, leased, run, values_of

ANSWER_S = 300.0


SOON = 0.03
"""Timeout of a lease: a beat comes every hundredth of a second."""


class FakeRenewer:
    """The store as a heartbeat sees it: each beat is answered by the test."""

    def __init__(self) -> None:
        self.beats: queue.Queue[tuple[list[int], list[int]]] = queue.Queue()
        self.answers: queue.Queue[list[int] | Exception] = queue.Queue()
        self.closed = threading.Event()

    def renew(self, lease_ids: list[int], tickets: list[int], timeout_s: float) -> list[int]:
        self.beats.put((sorted(lease_ids), sorted(tickets)))
        answer = self.answers.get(timeout=ANSWER_S)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def close(self) -> None:
        self.closed.set()

    def next(self, answer: list[int] | Exception) -> tuple[list[int], list[int]]:
        """What the next beat renews."""
        self.answers.put(answer)
        return self.beats.get(timeout=ANSWER_S)


def beating(body: Callable[[Heartbeat, FakeRenewer], None]) -> None:
    async def main() -> None:
        renewer = FakeRenewer()
        heartbeat = Heartbeat()
        heartbeat.begin(renewer, SOON)
        body(heartbeat, renewer)
        heartbeat.stop()
        renewer.answers.put([])
        assert renewer.closed.wait(ANSWER_S)

    asyncio.run(main())


def test_a_row_written_twice_ends_no_other_rows_heartbeat() -> None:
    def body(heartbeat: Heartbeat, renewer: FakeRenewer) -> None:
        heartbeat.hold(7, [0, 1])
        heartbeat.finished(7, [0])
        heartbeat.finished(7, [0])
        assert heartbeat.held == {7: {1}}
        assert renewer.next([]) == ([7], [])
        heartbeat.finished(7, [1])
        assert heartbeat.held == {}

    beating(body)


def test_a_row_dropped_and_then_written_ends_no_other_rows_heartbeat() -> None:
    async def body(store: Store, client: StoreClient) -> None:
        await client.put_groups([group(), group(1)])
        lease = await leased(client, "rollout", 2, "engine")
        values = values_of("rollout", lease)
        first = {name: column[:2] for name, column in values.items()}
        await client.drop(lease, [0, 1], "too_long")
        await client.write(lease, [0, 1], first)
        assert client.heartbeat.held == {lease.id: {2, 3}}

    run(body)


def test_what_was_let_go_is_renewed_no_more_and_with_nothing_held_beats_end() -> None:
    """Beats begin again when something is held."""

    def body(heartbeat: Heartbeat, renewer: FakeRenewer) -> None:
        heartbeat.hold(1, [0])
        heartbeat.hold(2, [1])
        assert renewer.next([])[0] == [1, 2]
        heartbeat.unhold(1)
        renewer.next([])  # perhaps on its way before
        assert renewer.next([]) == ([2], [])
        heartbeat.finished(2, [1])
        renewer.answers.put([])
        assert renewer.closed.wait(ANSWER_S)
        renewer.closed.clear()
        while not renewer.beats.empty():
            renewer.beats.get()
        assert not heartbeat.beats
        heartbeat.asked(5)
        assert heartbeat.beats
        assert renewer.beats.get(timeout=ANSWER_S)[1] == [5]

    beating(body)


def test_a_beat_that_fails_is_followed_by_others_and_told_once_it_matters(caplog: pytest.LogCaptureFixture) -> None:
    def body(heartbeat: Heartbeat, renewer: FakeRenewer) -> None:
        heartbeat.hold(1, [0])
        with caplog.at_level(logging.WARNING, logger="penstock"):
            deadline = time.monotonic() + ANSWER_S
            while "could not be renewed" not in caplog.text:
                renewer.next(TimeoutError("no answer"))
                assert time.monotonic() < deadline
        assert renewer.next([]) == ([1], [])
        heartbeat.asked(0)

    beating(body)


def test_what_the_store_says_is_over_is_renewed_no_more() -> None:
    def body(heartbeat: Heartbeat, renewer: FakeRenewer) -> None:
        heartbeat.hold(1, [0])
        heartbeat.hold(2, [1])
        renewer.next([1])
        assert renewer.next([])[0][-1] == 2
        assert heartbeat.held == {2: {1}}

    beating(body)


def test_what_ends_a_heartbeat_for_good_is_told_to_who_asks_next(caplog: pytest.LogCaptureFixture) -> None:
    def body(heartbeat: Heartbeat, renewer: FakeRenewer) -> None:
        heartbeat.hold(1, [0])
        with caplog.at_level(logging.WARNING, logger="penstock"):
            renewer.next(ZeroDivisionError("a bug"))
            assert renewer.closed.wait(ANSWER_S)
        assert "not renewed any more: ZeroDivisionError('a bug')" in caplog.text
        with pytest.raises(StoreError, match="not renewed any more: ZeroDivisionError"):
            heartbeat.asked(0)

    beating(body)


def test_a_store_that_is_gone_is_left_to_the_calls_to_tell() -> None:
    def body(heartbeat: Heartbeat, renewer: FakeRenewer) -> None:
        heartbeat.hold(1, [0])
        renewer.next(WorkerDied("gone"))
        assert renewer.closed.wait(ANSWER_S)
        heartbeat.asked(0)

    beating(body)


def test_a_heartbeat_ends_with_the_event_loop_of_its_client() -> None:
    renewer = FakeRenewer()

    async def main() -> None:
        heartbeat = Heartbeat()
        heartbeat.begin(renewer, SOON)
        heartbeat.hold(1, [0])

    asyncio.run(main())
    for _ in range(2):  # one beat may have begun before the loop was closed
        renewer.answers.put([])
    assert renewer.closed.wait(ANSWER_S)


# With a store.


@contextlib.contextmanager
def store_elsewhere(tmp_path: Path, **changes: Any) -> Iterator[tuple[Store, Endpoint]]:
    """A store whose event loop runs in a thread of its own, so that it goes on whatever blocks the client's."""
    spec = make_spec(**changes)
    store = Store(spec, segments=Segments(str(tmp_path / "shm"), str(tmp_path / "disk"), spec.shared_bytes))
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield store, asyncio.run_coroutine_threadsafe(store.endpoint(), loop).result(ANSWER_S)
        asyncio.run_coroutine_threadsafe(store.close("test over"), loop).result(ANSWER_S)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(ANSWER_S)


def visiting(endpoint: Endpoint, body: Callable[[StoreClient], Awaitable[None]]) -> None:
    async def main() -> None:
        await asyncio.wait_for(body(StoreClient(endpoint)), ANSWER_S)

    asyncio.run(main())


TIMEOUT_S = 1.0


def test_a_lease_outlives_a_computation_that_blocks_its_owners_event_loop(tmp_path: Path) -> None:
    async def body(client: StoreClient) -> None:
        await client.put_groups([group()])
        lease = await leased(client, "rollout", 1, "engine")
        time.sleep(1.7 * TIMEOUT_S)
        await client.write(lease, lease.rows.row_ids, values_of("rollout", lease))
        assert (await client.stats())["completed/rollout"] == 2
        assert (await client.stats()).get("leases/rollout") == 1

    with store_elsewhere(tmp_path, lease_timeout_s=TIMEOUT_S) as (_, endpoint):
        visiting(endpoint, body)


def test_a_lease_that_comes_while_the_event_loop_is_blocked_is_kept_too(tmp_path: Path) -> None:
    with store_elsewhere(tmp_path, lease_timeout_s=TIMEOUT_S) as (store, endpoint):

        async def body(client: StoreClient) -> None:
            asking = asyncio.ensure_future(client.lease("rollout", 1, "engine"))
            while not (await client.describe())["waiting"]["rollout"]:
                pass
            assert store.loop is not None
            asyncio.run_coroutine_threadsafe(StoreClient(store).put_groups([group()]), store.loop)
            time.sleep(1.7 * TIMEOUT_S)
            lease = await asking
            assert lease is not None
            await client.renew(lease)

        visiting(endpoint, body)


def test_a_client_that_is_given_up_returns_its_leases_though_its_process_lives(tmp_path: Path) -> None:
    async def leave(client: StoreClient) -> None:
        await client.put_groups([group()])
        assert await client.lease("rollout", 1, "given up") is not None

    async def stay(client: StoreClient) -> None:
        lease = await leased(client, "rollout", 1, "engine")
        assert lease.rows.row_ids.tolist() == [0, 1]

    with store_elsewhere(tmp_path, lease_timeout_s=600.0) as (_, endpoint):
        visiting(endpoint, leave)
        gc.collect()
        visiting(endpoint, stay)


def test_leases_survive_a_store_that_stands_still() -> None:
    async def body(store: Store, client: StoreClient) -> None:
        await client.put_groups([group()])
        lease = await leased(client, "rollout", 1, "engine")
        await asyncio.sleep(0)
        time.sleep(0.6)
        await asyncio.sleep(0.05)
        await client.renew(lease)

    run(body, lease_timeout_s=0.3)


WORKER = """
import asyncio, sys
from penstock.store.client.store_client import StoreClient
from penstock.store.service.store_server import Endpoint

async def main():
    lease = await StoreClient(Endpoint("", sys.argv[1], tuple(sys.argv[2:]))).lease("rollout", 1, "stopped")
    print("holds", flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.mark.real
def test_a_process_that_is_stopped_loses_its_lease_though_its_connection_lives(tmp_path: Path) -> None:
    async def body(client: StoreClient) -> None:
        await client.put_groups([group()])
        command = [sys.executable, "-c", WORKER, endpoint.path, *endpoint.segments]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as worker:
            try:
                assert worker.stdout is not None
                assert await asyncio.to_thread(worker.stdout.readline) == "holds\n"
                asking = asyncio.ensure_future(client.lease("rollout", 1, "engine"))
                done, _ = await asyncio.wait({asking}, timeout=2 * TIMEOUT_S)
                assert not done, "it was renewed while the worker lived"
                os.kill(worker.pid, signal.SIGSTOP)
                lease = await asking
                assert lease is not None
                assert lease.rows.row_ids.tolist() == [0, 1]
            finally:
                worker.kill()

    with store_elsewhere(tmp_path, lease_timeout_s=TIMEOUT_S) as (_, endpoint):
        visiting(endpoint, body)

"""Random histories of the real store actor and real worker processes, which are killed with SIGKILL as they work.

A worker is killed between lease and write, between the write and its answer, or while it waits for a lease; a producer
while its prompts wait for credits. Most of what they write lies in shared memory, some of it on disk. Whatever happens,
every row is trained exactly once with the values that were written or dropped with its reason, none is lost, no file is
left behind, and no call waits for ever.
"""

import asyncio
import contextlib
import gc
import os
import random
import signal
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from penstock.store.client.lease import SharedLease
from penstock.store.client.store_client import StoreClient
from penstock.store.data.roots import OWNER_NAME, SHARED_MEMORY
from penstock.store.errors import LeaseExpired
from tests.amounts import IS_MANY
from tests.store.driver import make_spec
from tests.store.players import STAGES, Served, group, leased, start_workers, values_of

ray = pytest.importorskip("ray")
pytestmark = pytest.mark.real

MAX_STALENESS, GROUPS_PER_STEP, GROUP_SIZE = 1, 2, 2
MORE_TOKENS = 2000
"""Tokens of every third response."""
INLINE_BYTES, SHARED_BYTES = 64, 2**16
"""Limits so small that all but rewards and advantages go through files, a few of them beyond the budget of shared
memory."""
ANSWER_S = 600.0
"""Nothing but a call that waits for ever takes so long: a process may take half a minute to start."""
SEEDS = random.sample(range(10**6), 50) if IS_MANY else [pytest.param(3, marks=pytest.mark.promise("2")), 6]
NUM_EVENTS = 25


class Worker:
    """A process of its own, perhaps on another machine. It cannot import the tests, so what it computes is brought by
    `players.values_of`."""

    def __init__(self, handle: Any, name: str, values_of: Any, node: str | None = None) -> None:
        import os

        from penstock.store.client.store_client import StoreClient

        self.client, self.name, self.values_of = StoreClient(handle, node), name, values_of
        self.process = os.getpid()
        self.held: list[Any] = []

    async def pid(self) -> int:
        return int(self.process)

    async def lease(self, stage: str, max_units: int) -> int:
        """Waits, and holds what it gets."""
        lease = await self.client.lease(stage, max_units, self.name)
        if lease is not None:
            self.held.append((lease, lease.rows.table().to_pylist()))
        return 0 if lease is None else len(lease.rows)

    async def write(self, version: int, times: int, some: bool) -> str:
        """The first lease it holds, perhaps one row of it only, perhaps more than once."""
        if not self.held:
            return "nothing held"
        lease, was = self.held[0] if some else self.held.pop(0)
        if lease.rows.table().to_pylist() != was:
            return "somebody has written to what it reads"
        rows = lease.rows.row_ids[:1] if some else lease.rows.row_ids
        values = {name: column[: len(rows)] for name, column in self.values_of(lease.stage, lease, version).items()}
        try:
            for _ in range(times):
                await self.client.write(lease, rows, values)
        except Exception as error:  # noqa: BLE001 - the test looks at which one it is
            return type(error).__name__
        return "written"

    async def put(self, groups: list[Any]) -> list[int]:
        return await self.client.put_groups(groups)


class History:
    """One store, two workers and the controller, which is this process. Made, then some `event`s, then `end`."""

    def __init__(self, dice: random.Random, disk: Path) -> None:
        from penstock.store.service.store_actor import create_store_actor

        self.dice, self.disk = dice, disk
        name = uuid.uuid4().hex
        self.memory = Path(SHARED_MEMORY) / f"penstock-histories-{name}"
        spec = make_spec(
            group_size=GROUP_SIZE,
            groups_per_step=GROUPS_PER_STEP,
            max_active_groups=(MAX_STALENESS + 1) * GROUPS_PER_STEP,
            max_staleness=MAX_STALENESS,
            lease_timeout_s=30.0,
            inline_bytes=INLINE_BYTES,
            shared_bytes=SHARED_BYTES,
            spill_dir=str(self.disk),
        )
        self.store = create_store_actor(spec, f"histories-{name}", directory=str(self.memory))
        self.workers: dict[str, Any] = {}
        self.count = self.round = 0
        self.serves = Served()
        self.trained: list[int] = []
        for _ in range(2):
            self.hire()
        groups = [group(number) for number in range((MAX_STALENESS + 1) * GROUPS_PER_STEP)]
        self.answer(self.any_worker().put.remote(groups))

    def hire(self) -> None:
        import cloudpickle

        from tests.store import players

        cloudpickle.register_pickle_by_value(players)
        self.count += 1
        name = f"worker-{self.count}"
        values = partial(values_of, more_tokens=MORE_TOKENS)
        node = self.dice.choice([None, "another machine"])
        self.workers[name] = ray.remote(num_cpus=0)(Worker).remote(self.store, name, values, node)

    def answer(self, ref: Any) -> Any:
        return ray.get(ref, timeout=ANSWER_S)

    def event(self) -> None:
        """What may happen at any moment, by its weight."""
        events = {self.admit: 4, self.lease: 8, self.write: 8, self.kill: 2, self.work_off: 1, self.publish: 2}
        self.dice.choices(list(events), list(events.values()))[0]()

    def admit(self) -> None:
        """Put groups by one worker. The call may wait for credits, and its worker may die with it."""
        self.any_worker().put.remote([group(number) for number in range(self.dice.randint(1, 3))])

    def lease(self) -> None:
        """Lease without waiting for the answer: the worker may be killed while it waits."""
        self.any_worker().lease.remote(self.dice.choice(STAGES), self.dice.randint(1, 3))

    def write(self) -> None:
        times, some = self.dice.randint(1, 2), self.dice.random() < 0.3
        ref = self.any_worker().write.remote(self.serves.version, times, some)
        if self.dice.random() < 0.5:
            assert self.answer(ref) in ("written", "nothing held", "LeaseExpired")

    def kill(self) -> None:
        """SIGKILL; then, as the controller does, its leases go back and another is hired."""
        self.dismiss(self.dice.choice(list(self.workers)))
        self.hire()

    def work_off(self) -> None:
        """This process does all that can be done, and the trainer trains it."""
        self.run(self._work_off)

    def publish(self) -> None:
        if self.serves.version < self.round:
            self.serves.version += 1
            self.ask("served", self.serves.version, 0)

    def any_worker(self) -> Any:
        return self.workers[self.dice.choice(list(self.workers))]

    def dismiss(self, name: str) -> None:
        pid = self.answer(self.workers.pop(name).pid.remote())
        os.kill(pid, signal.SIGKILL)
        self.ask("abandon", name)

    def ask(self, method: str, *arguments: Any) -> Any:
        return self.run(lambda client: getattr(client, method)(*arguments))

    def run(self, body: Callable[[StoreClient], Awaitable[Any]]) -> Any:
        async def main() -> Any:
            return await asyncio.wait_for(body(StoreClient(self.store)), ANSWER_S)

        result = asyncio.run(main())
        gc.collect()  # the connections of its clients end
        return result

    async def _work_off(self, client: StoreClient) -> None:
        async with self._working():
            while not await self._nothing_free(client):
                await asyncio.sleep(0.005)
        while (lease := await self._round(client, wait_s=0.1)) is not None:
            await self._train(client, lease)

    @contextlib.asynccontextmanager
    async def _working(self) -> AsyncIterator[None]:
        tasks = start_workers(self.store, self.serves, MORE_TOKENS)
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            ended = await asyncio.gather(*tasks, return_exceptions=True)
        assert [error for error in ended if not isinstance(error, asyncio.CancelledError)] == []

    async def _nothing_free(self, client: StoreClient) -> bool:
        """Whether nothing is free, nor held by the workers of this process, which have their stages' names."""
        state = await client.describe()
        held = {lease["owner"] for lease in state["leases"]}
        return not held & set(STAGES) and not any(state["rows"][stage]["free"] for stage in STAGES)

    async def _round(self, client: StoreClient, wait_s: float) -> SharedLease | None:
        """None if it is not formed by then: a living worker holds some of its rows."""
        asking = asyncio.ensure_future(client.lease_shared("train", self.round, 0, 1))
        await asyncio.wait({asking}, timeout=wait_s)
        if asking.done():
            return asking.result()
        asking.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asking
        return None

    async def _train(self, client: StoreClient, lease: SharedLease) -> None:
        versions = [min(row) for row in lease.rows.lists("token_versions")]
        assert lease.version - min(versions) <= MAX_STALENESS
        for stage in STAGES:
            for name, expected in values_of(stage, lease, more_tokens=MORE_TOKENS).items():
                if name in lease.rows.names and name != "token_versions":
                    assert lease.rows.table().column(name).to_pylist() == pa.array(expected).to_pylist(), name
        self.trained += lease.rows.row_ids.tolist()
        await client.complete_shared(lease.share)
        await client.complete_shared(lease.share)  # acknowledged twice
        self.round += 1

    def end(self) -> None:
        """Whatever has happened, everything is finished by this process alone."""
        for name in list(self.workers):
            self.dismiss(name)
        self.run(self._finish)
        self._check_numbers()
        self._check_files()

    async def _finish(self, client: StoreClient) -> None:
        """Nobody else is left, so every whole batch can be trained."""
        while any((await client.describe())["waiting"].values()):  # the store hears of the last dead
            await asyncio.sleep(0.005)
        async with self._working():
            while (await client.stats())["store/rows"] >= GROUPS_PER_STEP * GROUP_SIZE:
                lease = await client.lease_shared("train", self.round, 0, 1)
                assert lease is not None
                await self._train(client, lease)
                self.serves.version = self.round
                await client.served(self.round)

    def _check_numbers(self) -> None:
        stats = self.ask("stats")
        assert len(self.trained) == len(set(self.trained)) == stats["store/rows_trained"] > 0
        assert stats.get("dropped/stale", 0) == 0
        # What is left is less than a batch: nothing was lost on the way.
        admitted = stats["store/groups_admitted"] * GROUP_SIZE
        assert stats["store/rows"] == admitted - len(self.trained) < GROUPS_PER_STEP * GROUP_SIZE

    def _check_files(self) -> None:
        """Check that only those files are left that rows lie in, and that nobody holds a lease."""
        deadline = time.monotonic() + ANSWER_S
        while True:
            stats = self.ask("stats")
            kept = stats["store/shared_bytes"] + stats["store/spilled_bytes"]
            found = sum(file.stat().st_size for place in (self.memory, self.disk) for file in files_below(place))
            if found == kept and stats["store/leases"] == 0:
                return
            assert time.monotonic() < deadline, f"{found} bytes of files, {kept} in use, {stats['store/leases']} leases"


def files_below(place: Path) -> list[Path]:
    return [file for file in place.rglob("*") if file.is_file() and file.name != OWNER_NAME]


@pytest.mark.parametrize("seed", SEEDS)
def test_no_row_is_lost_and_none_trained_twice_whoever_is_killed(cluster: str, tmp_path: Path, seed: int) -> None:
    from penstock.store.service.store_actor import end_store_actor

    history = History(random.Random(seed), tmp_path)
    try:
        for _ in range(NUM_EVENTS):
            history.event()
        history.end()
    finally:
        end_store_actor(history.store, str(tmp_path))
    assert not history.memory.exists()
    assert not list(tmp_path.iterdir())


def test_a_waiting_call_of_a_killed_worker_gets_nothing(cluster: str) -> None:
    """The worker's lease would be a ghost until it ran out."""
    from penstock.store.service.store_actor import create_store_actor, end_store_actor

    store = create_store_actor(make_spec(lease_timeout_s=300.0), "ghosts")
    worker = ray.remote(num_cpus=0)(Worker).remote(store, "doomed", None)
    pid = ray.get(worker.pid.remote())
    worker.lease.remote("rollout", 1)

    async def survive() -> None:
        client = StoreClient(store)
        while not (await client.describe())["waiters"]["rollout"]:
            await asyncio.sleep(0.005)
        os.kill(pid, signal.SIGKILL)
        await client.abandon("doomed")
        await client.put_groups([group()])
        lease = await leased(client, "rollout", 1, "survivor")
        assert lease.rows.row_ids.tolist() == [0, 1]
        await client.release(lease)
        with pytest.raises(LeaseExpired):
            await client.renew(lease)

    asyncio.run(asyncio.wait_for(survive(), ANSWER_S))
    end_store_actor(store)

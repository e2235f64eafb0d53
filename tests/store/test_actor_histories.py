"""Random histories of the real store actor and real worker processes, which are killed with SIGKILL as they work.

A worker is killed between lease and write, between the write and its answer, or while it waits for a lease; a producer
while its prompts wait for credits. Whatever happens, every row is trained exactly once or dropped with its reason, none
is lost, and no call waits for ever.
"""

import asyncio
import contextlib
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from penstock.store.errors import LeaseExpired
from penstock.store.sync_client import SyncStoreClient
from tests.store.driver import make_spec
from tests.store.players import Served, group, start_workers

ray = pytest.importorskip("ray")
pytestmark = pytest.mark.ray

STAGES = ("rollout", "reward", "reference", "group_advantage")
MAX_STALENESS, GROUPS_PER_STEP, GROUP_SIZE = 1, 2, 2
ANSWER_S = 30.0
SOAK = bool(os.environ.get("PENSTOCK_SOAK"))


class Worker:
    """A process of its own. It cannot import the tests, so what it computes is brought by `players.values_of`."""

    def __init__(self, handle: Any, name: str, values_of: Any) -> None:
        import os

        from penstock.store.client import StoreClient

        self.client, self.name, self.values_of = StoreClient(handle), name, values_of
        self.process = os.getpid()
        self.held: list[Any] = []

    async def pid(self) -> int:
        return int(self.process)

    async def lease(self, stage: str, max_units: int) -> int:
        """Waits, and holds what it gets."""
        lease = await self.client.lease(stage, max_units, self.name)
        if lease is not None:
            self.held.append(lease)
        return 0 if lease is None else len(lease.rows)

    async def write(self, version: int, times: int, some: bool) -> str:
        """The first lease it holds, perhaps one row of it only, perhaps more than once."""
        if not self.held:
            return "nothing held"
        lease = self.held[0] if some else self.held.pop(0)
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


class Histories(RuleBasedStateMachine):
    """One store, two workers and the controller, which is this process."""

    cluster_count = 0

    @initialize()
    def start(self) -> None:
        from penstock.store.actor import create_store_actor
        from tests.store.players import values_of

        Histories.cluster_count += 1
        spec = make_spec(
            group_size=GROUP_SIZE,
            groups_per_step=GROUPS_PER_STEP,
            max_active_groups=(MAX_STALENESS + 1) * GROUPS_PER_STEP,
            max_staleness=MAX_STALENESS,
            lease_timeout_s=30.0,
        )
        self.store = create_store_actor(spec, f"histories-{Histories.cluster_count}")
        self.client = SyncStoreClient(self.store)
        self.values_of = values_of
        self.workers: dict[str, Any] = {}
        self.count = self.round = self.served = self.put = 0
        self.trained: list[int] = []
        for _ in range(2):
            self.hire()

    def hire(self) -> str:
        import cloudpickle

        from tests.store import players

        cloudpickle.register_pickle_by_value(players)
        self.count += 1
        name = f"worker-{self.count}"
        self.workers[name] = ray.remote(num_cpus=0)(Worker).remote(self.store, name, self.values_of)
        return name

    def answer(self, ref: Any) -> Any:
        return ray.get(ref, timeout=ANSWER_S)

    @rule(count=st.integers(1, 3))
    def admit(self, count: int) -> None:
        """By the first worker; the call may wait for credits, and its worker may die with it."""
        next(iter(self.workers.values())).put.remote([group(number) for number in range(count)])

    @rule(stage=st.sampled_from(STAGES), max_units=st.integers(1, 3), which=st.integers(0, 1))
    def lease(self, stage: str, max_units: int, which: int) -> None:
        """Not waited for: the worker may be killed while it waits."""
        list(self.workers.values())[which].lease.remote(stage, max_units)

    @rule(which=st.integers(0, 1), times=st.integers(1, 2), some=st.booleans(), wait=st.booleans())
    def write(self, which: int, times: int, some: bool, wait: bool) -> None:
        ref = list(self.workers.values())[which].write.remote(self.served, times, some)
        if wait:
            assert self.answer(ref) in ("written", "nothing held", "LeaseExpired")

    @rule(which=st.integers(0, 1))
    def kill(self, which: int) -> None:
        """SIGKILL; then, as the controller does, its leases go back and another is hired."""
        name = list(self.workers)[which]
        worker = self.workers.pop(name)
        os.kill(self.answer(worker.pid.remote()), signal.SIGKILL)
        ray.get(self.store.abandon.remote(name), timeout=ANSWER_S)
        self.hire()

    @rule()
    def finish_what_is_free(self) -> None:
        """Live workers do all that can be done, and the trainer trains it."""
        asyncio.run(self._work_off(lease_wait_s=0.3))

    @rule()
    def publish(self) -> None:
        """If there is something to publish, which depends on how fast processes were: no precondition, since those must
        be the same whenever a history is played again."""
        if self.served == self.round:
            return
        self.served += 1
        ray.get(self.store.published.remote(self.served), timeout=ANSWER_S)

    async def _work_off(self, lease_wait_s: float) -> None:
        tasks = start_workers(self.store, Served(self.served))
        await asyncio.sleep(lease_wait_s)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0.05)  # what they gave back has arrived
        await self._train()

    async def _train(self) -> None:
        from penstock.store.client import StoreClient

        client = StoreClient(self.store)
        while True:
            asking = asyncio.ensure_future(client.lease_shared("train", self.round, 0, 1))
            done, _ = await asyncio.wait({asking}, timeout=0.1)
            if not done:
                asking.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await asking
                return
            lease = asking.result()
            assert lease is not None
            versions = [min(row) for row in lease.rows.lists("token_versions")]
            assert lease.version - min(versions) <= MAX_STALENESS
            self.trained += lease.rows.row_ids.tolist()
            await client.complete_shared(lease)
            await client.complete_shared(lease)  # acknowledged twice
            self.round += 1

    def teardown(self) -> None:
        if not hasattr(self, "store"):
            return
        try:
            for name, worker in self.workers.items():
                ray.kill(worker)
                ray.get(self.store.abandon.remote(name), timeout=ANSWER_S)
            for _ in range(8):
                while self.served < self.round:
                    self.publish()
                self.finish_what_is_free()
            stats = ray.get(self.store.stats.remote(), timeout=ANSWER_S)
            assert len(self.trained) == len(set(self.trained)) == stats.get("store/rows_trained", 0)
            assert stats.get("dropped/stale", 0) == 0
            # What is left is less than a batch: nothing was lost on the way.
            admitted = stats.get("store/groups_admitted", 0) * GROUP_SIZE
            assert stats["store/rows"] == admitted - len(self.trained) < GROUPS_PER_STEP * GROUP_SIZE
            assert stats["store/leases"] == 0
        finally:
            ray.kill(self.store)


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    ray.init(
        address="local", num_cpus=4, include_dashboard=False, object_store_memory=120 * 2**20, logging_level="ERROR"
    )
    yield
    ray.shutdown()


def test_no_row_is_lost_and_none_trained_twice_whoever_is_killed(cluster: None) -> None:
    run_state_machine_as_test(
        Histories,
        settings=settings(
            max_examples=50 if SOAK else 5,
            derandomize=not SOAK,
            stateful_step_count=15,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            phases=(Phase.generate,),  # shrinking takes minutes with real processes
        ),
    )


def test_a_waiting_call_of_a_killed_worker_gets_nothing(cluster: None) -> None:
    """Its lease would be a ghost until it ran out."""
    from penstock.store.actor import create_store_actor

    store = create_store_actor(make_spec(lease_timeout_s=300.0), "ghosts")
    client = SyncStoreClient(store)
    worker = ray.remote(num_cpus=0)(Worker).remote(store, "doomed", None)
    pid = ray.get(worker.pid.remote())
    worker.lease.remote("rollout", 1)
    while not any(ray.get(store.describe.remote(), timeout=ANSWER_S)["waiters"]["rollout"]):
        pass
    os.kill(pid, signal.SIGKILL)
    ray.get(store.abandon.remote("doomed"), timeout=ANSWER_S)
    asyncio.run(_put(store))
    lease = client.lease("rollout", 1, "survivor")
    assert lease is not None
    assert lease.rows.row_ids.tolist() == [0, 1]
    client.release(lease)
    with pytest.raises(LeaseExpired):
        client.renew(lease)
    ray.kill(store)


async def _put(store: Any) -> None:
    from penstock.store.client import StoreClient

    await StoreClient(store).put_groups([group()])

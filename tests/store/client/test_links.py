"""Calls through Ray when the network is bad: what may be repeated is, what may not is named; nothing is left behind.

The actor is a stand-in, so that its answers can be lost at will. With a real one: `test_over_ray.py`.
"""

import asyncio
import concurrent.futures
import pickle
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError

from penstock.conf.errors import PartnerGone
from penstock.store.client.client import StoreClient
from penstock.store.client.links import OverRay
from penstock.store.data.segments import Segments
from penstock.store.errors import StoreUnreachable
from penstock.store.service.calls import LeaseRequest, with_values
from penstock.store.service.store import Store
from tests.store.driver import make_spec
from tests.store.players import group, values_of

LONG = 2000
"""Tokens of a prompt: more than travels inline."""


class Ref:
    """Of an actor call under way."""

    def __init__(self, answer: "asyncio.Task[Any]") -> None:
        self._future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        answer.add_done_callback(self._done)

    def _done(self, answer: "asyncio.Task[Any]") -> None:
        if not answer.cancelled() and (error := answer.exception()):
            self._future.set_exception(error)
        elif not answer.cancelled():
            self._future.set_result(answer.result())

    def future(self) -> "concurrent.futures.Future[Any]":
        return self._future


class Actor:
    """A handle of the store's actor. `before` and `after`: by method, how often the connection breaks before a call
    arrives, or before its answer does."""

    def __init__(self, store: Store, segments: Segments) -> None:
        self.store, self.segments = store, segments
        self.before: Counter[str] = Counter()
        self.after: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()
        self.dead = False
        self.answering: Callable[[str, Any], Awaitable[None]] | None = None

    def __getattr__(self, method: str) -> Any:
        return Method(self, method)

    async def perform(self, method: str, arguments: tuple[Any, ...]) -> Any:
        self.calls[method] += 1
        if self.dead:
            raise ActorDiedError
        self._break(self.before, method)
        value = with_values(await getattr(self.store, method)(*arguments), self.segments.open)
        self._break(self.after, method)
        if self.answering is not None:
            await self.answering(method, value)
        return pickle.loads(pickle.dumps(value))

    def _break(self, times: "Counter[str]", method: str) -> None:
        if times[method] > 0:
            times[method] -= 1
            raise ActorUnavailableError("the connection broke", None)


class Method:
    def __init__(self, actor: Actor, name: str) -> None:
        self._actor, self._name = actor, name

    def remote(self, *arguments: Any) -> Ref:
        return Ref(asyncio.ensure_future(self._actor.perform(self._name, arguments)))


def from_elsewhere(tmp_path: Path, body: Callable[[Actor, StoreClient], Awaitable[None]]) -> None:
    """`body` gets the actor, and a client on another machine."""

    async def main() -> None:
        spec = make_spec(lease_timeout_s=600.0, inline_bytes=1000)
        segments = Segments(str(tmp_path / "shm"), str(tmp_path / "disk"), spec.shared_bytes)
        store = Store(spec, segments=segments, node="here")
        actor = Actor(store, segments)
        client = StoreClient(actor, node="elsewhere")
        await client.spec()
        assert isinstance(client._link.found, OverRay)  # type: ignore[attr-defined]
        await asyncio.wait_for(body(actor, client), 20)
        store.ledger.check_invariants()
        await store.close("test over")

    asyncio.run(main())


def held(actor: Actor) -> list[int]:
    return list(actor.store.ledger.residents.leases.held)


def test_a_call_that_may_be_repeated_is_until_it_is_answered(tmp_path: Path) -> None:
    async def body(actor: Actor, client: StoreClient) -> None:
        await client.put_groups([group()])
        lease = await client.lease("rollout", 1, "engine")
        assert lease is not None
        actor.before["many"] = actor.after["many"] = 1
        await client.write(lease, lease.rows.row_ids, values_of("rollout", lease))
        assert actor.calls["many"] == 3
        stats = await client.stats()
        assert (stats["completed/rollout"], stats["ignored/late"]) == (2, 2)

    from_elsewhere(tmp_path, body)


def test_groups_are_put_once_or_the_run_is_told_that_nobody_knows(tmp_path: Path) -> None:
    async def body(actor: Actor, client: StoreClient) -> None:
        actor.after["put"] = 1
        with pytest.raises(StoreUnreachable, match="call 'put' is not repeated"):
            await client.put_groups([group()])
        assert actor.calls["put"] == 1

    from_elsewhere(tmp_path, body)


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_lease_that_was_lost_on_its_way_goes_back_and_is_asked_for_again(tmp_path: Path, when: str) -> None:
    async def body(actor: Actor, client: StoreClient) -> None:
        await client.put_groups([group()])
        getattr(actor, when)["lease"] = 1
        lease = await client.lease("rollout", 1, "engine")
        assert lease is not None
        assert lease.rows.row_ids.tolist() == [0, 1]
        assert held(actor) == [lease.id]
        assert client._heartbeat.held == {lease.id: {0, 1}}

    from_elsewhere(tmp_path, body)


def test_calls_are_not_repeated_for_ever(tmp_path: Path) -> None:
    async def body(actor: Actor, client: StoreClient) -> None:
        actor.before["stats"] = 1000
        impatient = OverRay(actor, "impatient", patience_s=0.5)
        with pytest.raises(StoreUnreachable, match=r"call 'stats' was repeated for 0.5 s: .*the connection broke"):
            await impatient.call("stats")
        assert actor.calls["stats"] > 1

    from_elsewhere(tmp_path, body)


def test_a_dead_actor_is_not_called_again(tmp_path: Path) -> None:
    async def body(actor: Actor, client: StoreClient) -> None:
        actor.dead = True
        with pytest.raises(PartnerGone, match="the store's process is gone"):
            await client.stats()
        assert actor.calls["stats"] == 1

    from_elsewhere(tmp_path, body)


def test_rows_that_end_before_their_grant_arrives_are_read_all_the_same(tmp_path: Path) -> None:
    async def body(actor: Actor, client: StoreClient) -> None:
        await client.put_groups([{"prompt_ids": [7] * LONG, "task": "{}"}])

        async def drop(method: str, value: Any) -> None:
            if method == "lease":
                await actor.store.drop(value[0].lease_id, "rollout", [0, 1], "test", "")

        actor.answering = drop
        lease = await client.lease("rollout", 1, "engine")
        assert lease is not None
        assert (await client.stats())["store/rows"] == 0
        assert lease.rows.lists("prompt_ids") == [[7] * LONG] * 2

    from_elsewhere(tmp_path, body)


def test_a_grant_carries_no_more_than_the_rows_and_columns_that_are_wanted(tmp_path: Path) -> None:
    async def body(actor: Actor, client: StoreClient) -> None:
        await client.put_groups([{"prompt_ids": [number] * LONG, "task": "t" * LONG} for number in range(4)])
        answer = await client._link.call("lease", LeaseRequest("rollout", 1, "engine", client="c"))
        batches = [source.batch for source in answer[0].payload.sources]
        assert answer[0].payload.refs == []
        assert [batch.schema.names for batch in batches] == [["prompt_ids"]]
        assert sum(batch.nbytes for batch in batches) < 2 * LONG * 4 + 100

    from_elsewhere(tmp_path, body)


def test_a_cancelled_call_leaves_nobody_waiting_and_nothing_leased(tmp_path: Path) -> None:
    async def body(actor: Actor, client: StoreClient) -> None:
        on_its_way, arrived = asyncio.Event(), asyncio.Event()

        async def delay(method: str, value: Any) -> None:
            if method == "lease":
                on_its_way.set()
                await arrived.wait()

        actor.answering = delay
        waiting = asyncio.ensure_future(client.lease("reward", 1, "gone"))
        await client.put_groups([group()])
        granted = asyncio.ensure_future(client.lease("rollout", 1, "gone"))
        await on_its_way.wait()
        for asking in (waiting, granted):
            assert asking.cancel()
        while held(actor) or any(map(len, actor.store._consumers.values())):
            await asyncio.sleep(0)
        arrived.set()
        again = await client.lease("rollout", 1, "engine")
        assert again is not None
        assert held(actor) == [again.id]
        assert client._heartbeat.held.keys() == {again.id}

    from_elsewhere(tmp_path, body)

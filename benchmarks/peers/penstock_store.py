"""Penstock's store under the store benchmark's workload, op by op: the same protocol as `transfer_queue.py`.

    in   {"op": "put"|"lease"|"stages", "rows": N, "batch": B, "min_tokens": a, "max_tokens": b, "resident": R, ...}
    out  {"rows": N, "seconds": s, "bytes": n, "latencies_ms": [...]}

put      one producer process puts N rows (prompt, response, log-probabilities), B at a time
lease    one consumer process leases them, B at a time, and reads every response
stages   a producer and three stages, four processes at work at once: prompts in, responses and log-probabilities
         written, rewards written, and the last stage reads all of it and ends the rows

R rows more, which have their prompt only, are resident all the time: they lie behind those under test. Rows are in
groups of 8 (1 if B is 1). With B of 1 every row is put, leased, written and trained by itself; up to `IN_FLIGHT` of
them are under way in a process at a time.
"""

import asyncio
import os
import time
from typing import Any

os.environ.setdefault("RAY_worker_niceness", "0")

import numpy as np
import ray

from benchmarks.peers.channel import Channel
from penstock.algorithms.graph.columns import STANDARD_COLUMNS
from penstock.store.client.client import StoreClient
from penstock.store.client.lease import Lease
from penstock.store.service.actor import create_store_actor, end_store_actor
from penstock.store.spec import StageSpec, StoreSpec

PROMPT_TOKENS = 32
DEADLINE_S = 120.0
IN_FLIGHT = 32
RESPONSE = ("response_ids", "behavior_logprobs")
Request = dict[str, Any]


def make_spec(request: Request) -> StoreSpec:
    batch, staged = request["batch"], request["op"] == "stages"
    size = min(8, batch) if staged else 1
    source = ("prompt_ids",) if staged else ("prompt_ids", *RESPONSE)
    stages = (StageSpec("rollout", "sample", ("prompt_ids",), RESPONSE),) if staged else ()
    return StoreSpec(
        columns=tuple(STANDARD_COLUMNS[name] for name in ("prompt_ids", *RESPONSE, "reward")),
        source_columns=source,
        stages=(
            *stages,
            StageSpec("reward", "sample", ("response_ids",), ("reward",)),
            StageSpec("train", "batch", (*RESPONSE, "reward"), ()),
        ),
        group_size=size,
        groups_per_step=batch // size,
        max_active_groups=10**9,
        max_staleness=10**9,
        max_bytes=64 * 2**30,
        strict=False,
    )


class Responses:
    """Pieces of one array of random tokens, so that making them costs nothing."""

    def __init__(self, request: Request) -> None:
        generator = np.random.default_rng(request["seed"])
        self.longest = request["max_tokens"]
        self.tokens = generator.integers(0, 30_000, 4 * self.longest, dtype=np.int32)
        self.logprobs = -generator.random(4 * self.longest, dtype=np.float32)
        self.lengths = generator.integers(request["min_tokens"], self.longest + 1, 4096)
        self.made = 0

    def take(self, count: int) -> dict[str, list[np.ndarray]]:
        columns: dict[str, list[np.ndarray]] = {name: [] for name in RESPONSE}
        for _ in range(count):
            length = int(self.lengths[self.made % len(self.lengths)])
            start = self.made * 61 % (3 * self.longest)
            self.made += 1
            columns["response_ids"].append(self.tokens[start : start + length])
            columns["behavior_logprobs"].append(self.logprobs[start : start + length])
        return columns


class Worker:
    """One process of the benchmark. Each method is a role."""

    async def begin(self, store: Any, request: Request) -> None:
        """Before each operation: nothing of it is measured."""
        self.client = StoreClient(store)
        self.request = request
        self.rows, self.batch = request["rows"], request["batch"]
        self.responses = Responses(request)
        self.lanes = asyncio.Semaphore(IN_FLIGHT if self.batch == 1 else 2)
        self.ahead = IN_FLIGHT - 1 if self.batch == 1 else 1
        self.latencies: list[float] = []
        await self.client.spec()

    async def put(self, with_response: bool) -> Request:
        spec = await self.client.spec()
        prompt = np.arange(PROMPT_TOKENS, dtype=np.int32)

        async def one(groups: list[dict[str, Any]]) -> None:
            start = time.perf_counter()
            await self.client.put_groups(groups)
            self.latencies.append(1000 * (time.perf_counter() - start))

        nbytes, start = 0, time.perf_counter()
        tasks: list[asyncio.Task[None]] = []
        for _ in range(self.rows // self.batch):
            groups: list[dict[str, Any]] = [{"prompt_ids": prompt} for _ in range(self.batch // spec.group_size)]
            if with_response:
                columns = self.responses.take(len(groups))
                for name in RESPONSE:
                    for group, values in zip(groups, columns[name], strict=True):
                        group[name] = values
                        nbytes += values.nbytes
            tasks.append(await self._start(one(groups)))
        await asyncio.gather(*tasks)
        return self._answer(start, nbytes)

    async def lease(self) -> Request:
        nbytes, left, start = 0, self.rows, time.perf_counter()
        async with self.client.leases("reward", self.batch, "reader", ahead=self.ahead) as leases:
            while left:
                asked = time.perf_counter()
                lease = await anext(leases)
                nbytes += read(lease, ("response_ids",))
                self.latencies.append(1000 * (time.perf_counter() - asked))
                left -= len(lease.rows)
        return self._answer(start, nbytes)

    async def respond(self) -> Request:
        """Stage 1."""
        return await self._serve("rollout", lambda lease: self.responses.take(len(lease.rows)))

    async def reward(self) -> Request:
        """Stage 2."""

        def score(lease: Lease) -> dict[str, Any]:
            return {"reward": [float(read(lease, ("response_ids",)))] * len(lease.rows)}

        return await self._serve("reward", score)

    async def train(self) -> Request:
        """Stage 3: the batches in order."""
        nbytes, start = 0, time.perf_counter()
        tasks: list[asyncio.Task[None]] = []
        ready: asyncio.Queue[Any] = asyncio.Queue(self.ahead)
        fetching = asyncio.ensure_future(self._fetch_rounds(ready))
        for _ in range(self.rows // self.batch):
            asked = time.perf_counter()
            lease = await ready.get()
            nbytes += read(lease, RESPONSE)
            tasks.append(await self._start(self.client.complete_shared(lease.share)))
            self.latencies.append(1000 * (time.perf_counter() - asked))
        await fetching
        await asyncio.gather(*tasks)
        return self._answer(start, nbytes)

    async def _fetch_rounds(self, ready: "asyncio.Queue[Any]") -> None:
        """One after the other, as they are numbered, while those before are read."""
        for number in range(self.rows // self.batch):
            await ready.put(await self.client.lease_shared("train", number, 0, 1))

    async def _serve(self, stage: str, values: Any) -> Request:
        left, start = self.rows, time.perf_counter()
        tasks: list[asyncio.Task[None]] = []

        async def one(lease: Lease) -> None:
            await self.client.write(lease, lease.rows.row_ids, values(lease))

        async with self.client.leases(stage, self.batch, stage, ahead=self.ahead) as leases:
            while left:
                lease = await anext(leases)
                left -= len(lease.rows)
                tasks.append(await self._start(one(lease)))
        await asyncio.gather(*tasks)
        return self._answer(start, 0)

    async def _start(self, work: Any) -> "asyncio.Task[None]":
        """As soon as fewer than the lanes allow are under way."""
        await self.lanes.acquire()
        task = asyncio.ensure_future(work)
        task.add_done_callback(lambda _: self.lanes.release())
        return task

    def _answer(self, start: float, nbytes: int) -> Request:
        now = time.perf_counter()
        return {"rows": self.rows, "seconds": now - start, "bytes": nbytes, "latencies_ms": self.latencies}


def read(lease: Lease, names: tuple[str, ...]) -> int:
    """Touch every value; the bytes."""
    nbytes = 0
    for name in names:
        values, _ = lease.rows.ragged(name)
        values.sum()
        nbytes += values.nbytes
    return nbytes


class Side:
    """Four processes that stay, and a store for each operation."""

    def __init__(self) -> None:
        self.count = 0
        self.workers = [ray.remote(num_cpus=0)(Worker).remote() for _ in range(4)]

    async def run(self, request: Request) -> Request:
        if request["op"] == "raw":
            return raw(request)
        self.count += 1
        store = create_store_actor(make_spec(request), f"bench-{self.count}")
        try:
            await asyncio.gather(*(worker.begin.remote(store, request) for worker in self.workers))
            operation = getattr(self, request["op"])(store, self.workers, request)
            return dict(await asyncio.wait_for(operation, DEADLINE_S))
        except TimeoutError:
            return {"error": f"not done after {DEADLINE_S:g} s"}
        finally:
            end_store_actor(store)

    async def put(self, store: Any, workers: list[Any], request: Request) -> Request:
        await reside(StoreClient(store), request, True)
        return dict(await workers[0].put.remote(True))

    async def lease(self, store: Any, workers: list[Any], request: Request) -> Request:
        await workers[0].put.remote(True)
        await reside(StoreClient(store), request, True)
        return dict(await workers[1].lease.remote())

    async def stages(self, store: Any, workers: list[Any], request: Request) -> Request:
        producer, *stages = workers
        client = StoreClient(store)
        await reside(client, request, False)
        start = time.perf_counter()
        roles = ("respond", "reward", "train")
        running = [getattr(worker, role).remote() for worker, role in zip(stages, roles, strict=True)]
        await producer.put.remote(False)
        answers = await asyncio.gather(*running)
        return {**answers[-1], "seconds": time.perf_counter() - start, "store": await client.stats()}


def raw(request: Request) -> Request:
    """What Ray's object store does with the batches: put, get, and one copy."""
    responses = Responses(request)
    batches = []
    for _ in range(request["rows"] // request["batch"]):
        columns = responses.take(request["batch"])
        batches.append([np.concatenate(columns[name]) for name in RESPONSE])
    nbytes, latencies, start = 0, [], time.perf_counter()
    for batch in batches:
        asked = time.perf_counter()
        for array in ray.get(ray.put(batch)):
            nbytes += array.copy().nbytes
        latencies.append(1000 * (time.perf_counter() - asked))
    seconds = time.perf_counter() - start
    return {"rows": request["rows"], "seconds": seconds, "bytes": nbytes, "latencies_ms": latencies}


async def reside(client: StoreClient, request: Request, with_response: bool) -> None:
    """Rows that stay."""
    size = (await client.spec()).group_size
    group: dict[str, Any] = {"prompt_ids": np.arange(PROMPT_TOKENS, dtype=np.int32)}
    if with_response:
        group |= {"response_ids": np.zeros(1, np.int32), "behavior_logprobs": np.zeros(1, np.float32)}
    for start in range(0, request["resident"] // size, 1000):
        await client.put_groups([group] * min(1000, request["resident"] // size - start))


async def main() -> None:
    channel = Channel()
    ray.init(address="local", num_cpus=8, include_dashboard=False, logging_level="ERROR", log_to_driver=False)
    side = Side()
    channel.send({"ready": True, "versions": {"ray": ray.__version__}})
    await channel.serve(side.run)
    ray.shutdown()


if __name__ == "__main__":
    asyncio.run(main())

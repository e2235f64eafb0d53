"""Penstock's store under the store benchmark's workload, op by op: the same protocol as `transfer_queue.py`.

    in   {"op": "put"|"lease"|"stages"|"raw"|"alone", "rows": N, "batch": B, "min_tokens": a, "max_tokens": b,
          "resident": R, "in_flight": k, "seed": s}
    out  {"rows": N, "seconds": s, "bytes": n, "latencies_ms": [...]}

put      one producer process puts N rows (prompt, response, log-probabilities), B at a time
lease    one consumer process leases them, B at a time, and reads every response
stages   a producer and three stages, four processes at work at once: prompts in, responses and log-probabilities
         written, rewards written, and the last stage reads all of it and ends the rows. From the first put to the end
         of the last batch
raw      the same values by Ray's object store, three processes at work at once: one puts them, the two others read
         what the stages read, four batches a call, since a call costs as much as some megabytes
alone    the same by one process: put, get and copy. What `raw` has put stays until then, so that this, too, has fresh
         pages in the first round

`stages` keeps its store: the first round has fresh pages, later ones have those of the rounds before, as a run has.
`put` and `lease` have a new store each. Every row's values lie in memory of their own, made before the clock starts;
every group has a prompt of its own. A process has k requests under way at a time, leases and writes together.

R rows more are resident all the time. In `put` and `lease` they lie behind those under test; in `stages` they are a
backlog: what is trained was put so many rows before. Rows are in groups of 8 (1 if B is 1). With B of 1 every row is
put, leased, written and trained by itself.
"""

import asyncio
import os
import time
from itertools import pairwise
from typing import Any

os.environ.setdefault("RAY_worker_niceness", "0")

import numpy as np
import ray

from benchmarks.peers.channel import Channel
from penstock.algorithms.graph.columns import STANDARD_COLUMNS
from penstock.store.client.lease import Lease
from penstock.store.client.store_client import StoreClient
from penstock.store.service.store_actor import create_store_actor, end_store_actor
from penstock.store.spec import StageSpec, StoreSpec

PROMPT_TOKENS = 32
DEADLINE_S = 120.0
RAW_BATCHES = 4
"""Number of batches in a call of Ray's."""
ROLES = ("put", "respond", "reward", "train")
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
    """Rows one after the other in one array a column, made before the clock starts; no two share their memory."""

    def __init__(self, request: Request) -> None:
        generator = np.random.default_rng(request["seed"])
        lengths = generator.integers(request["min_tokens"], request["max_tokens"] + 1, request["rows"])
        self.ends = np.concatenate([[0], np.cumsum(lengths)])
        self.tokens = generator.integers(0, 30_000, self.ends[-1], dtype=np.int32)
        self.logprobs = -generator.random(self.ends[-1], dtype=np.float32)
        self.prompts = generator.integers(0, 30_000, (request["rows"], PROMPT_TOKENS), dtype=np.int32)
        self.checksum = int(self.tokens.sum())
        self.made = 0

    def take(self, count: int) -> dict[str, list[np.ndarray]]:
        """Take the next rows."""
        ends = self.ends[self.made : self.made + count + 1].tolist()
        self.made += count
        pairs = list(pairwise(ends))
        return {
            "response_ids": [self.tokens[start:end] for start, end in pairs],
            "behavior_logprobs": [self.logprobs[start:end] for start, end in pairs],
        }

    def batches(self, size: int) -> list[list[np.ndarray]]:
        """Columns of so many rows at a time."""
        ends = self.ends[::size].tolist()
        return [[self.tokens[start:end], self.logprobs[start:end]] for start, end in pairwise(ends)]


class Worker:
    """A process of the benchmark. Each method is a role."""

    async def begin(self, store: Any, request: Request, is_new: bool) -> None:
        """Prepare an operation: nothing of it is measured. `is_new`: the store."""
        if is_new:
            self.client, self.trained = StoreClient(store), 0
        self.rows, self.batch = request["rows"], request["batch"]
        self.responses = Responses(request)
        self.in_flight = request["in_flight"]
        self.ahead = self.in_flight // 2
        self.lanes = asyncio.Semaphore(self.in_flight - self.ahead)
        self.latencies: list[float] = []
        self.checksum = 0
        await self.client.spec()
        self.cpu_s = time.process_time()

    async def put(self, with_response: bool) -> Request:
        spec = await self.client.spec()
        self.lanes = asyncio.Semaphore(self.in_flight)
        prompts = iter(self.responses.prompts)

        async def one(groups: list[dict[str, Any]]) -> None:
            start = time.monotonic()
            await self.client.put_groups(groups)
            self.latencies.append(1000 * (time.monotonic() - start))

        nbytes, start = 0, time.monotonic()
        tasks: list[asyncio.Task[None]] = []
        for _ in range(self.rows // self.batch):
            groups: list[dict[str, Any]] = [{"prompt_ids": next(prompts)} for _ in range(self.batch // spec.group_size)]
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
        nbytes, left, start = 0, self.rows, time.monotonic()
        async with self.client.leases("reward", self.batch, "reader", ahead=self.ahead) as leases:
            while left:
                asked = time.monotonic()
                lease = await anext(leases)
                nbytes += self._read(lease, ("response_ids",))
                self.latencies.append(1000 * (time.monotonic() - asked))
                left -= len(lease.rows)
        return self._answer(start, nbytes)

    async def respond(self) -> Request:
        """Run stage 1."""
        return await self._serve("rollout", lambda lease: self.responses.take(len(lease.rows)))

    async def reward(self) -> Request:
        """Run stage 2."""

        def score(lease: Lease) -> dict[str, Any]:
            return {"reward": [float(self._read(lease, ("response_ids",)))] * len(lease.rows)}

        return await self._serve("reward", score)

    async def train(self) -> Request:
        """Run stage 3: the batches in order."""
        nbytes, start = 0, time.monotonic()
        tasks: list[asyncio.Task[None]] = []
        ready: asyncio.Queue[Any] = asyncio.Queue(self.ahead)
        fetching = asyncio.ensure_future(self._fetch_rounds(ready))
        for _ in range(self.rows // self.batch):
            asked = time.monotonic()
            lease = await ready.get()
            nbytes += self._read(lease, RESPONSE)
            tasks.append(await self._start(self.client.complete_shared(lease.share)))
            self.latencies.append(1000 * (time.monotonic() - asked))
        await fetching
        await asyncio.gather(*tasks)
        return self._answer(start, nbytes)

    async def _fetch_rounds(self, ready: "asyncio.Queue[Any]") -> None:
        """Fetch rounds one after the other, as they are numbered, while those before are read."""
        for _ in range(self.rows // self.batch):
            await ready.put(await self.client.lease_shared("train", self.trained, 0, 1))
            self.trained += 1

    async def _serve(self, stage: str, values: Any) -> Request:
        left, start = self.rows, time.monotonic()
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
        """Start work as soon as fewer than the lanes allow are under way."""
        await self.lanes.acquire()
        task = asyncio.ensure_future(work)
        task.add_done_callback(lambda _: self.lanes.release())
        return task

    async def raw_write(self, readers: list[tuple[Any, int]]) -> Request:
        """Put the batches and have them read. `readers`: and how many of the columns each reads."""
        start = time.monotonic()

        async def one(batches: list[list[np.ndarray]]) -> None:
            refs = [ray.put(batch) for batch in batches]
            self.held += refs
            await asyncio.gather(*(reader.raw_read.remote(refs, count) for reader, count in readers))

        firsts = range(0, len(self.batches), RAW_BATCHES)
        tasks = [await self._start(one(self.batches[first : first + RAW_BATCHES])) for first in firsts]
        await asyncio.gather(*tasks)
        return self._answer(start, sum(array.nbytes for batch in self.batches for array in batch))

    async def raw_alone(self) -> Request:
        nbytes, start = 0, time.monotonic()
        for batch in self.batches:
            for array in ray.get(ray.put(batch)):  # `await` is slower, and there is nothing else to do
                nbytes += array.copy().nbytes
        self.held = []
        return self._answer(start, nbytes)

    async def raw_begin(self, request: Request) -> None:
        self.rows = request["rows"]
        self.batches = Responses(request).batches(request["batch"])
        self.held: list[Any] = []
        self.lanes, self.latencies, self.checksum = asyncio.Semaphore(request["in_flight"]), [], 0
        self.cpu_s = time.process_time()

    async def raw_read(self, refs: list[Any], count: int) -> None:
        for columns in ray.get(refs):
            for values in columns[:count]:
                values.sum()

    def _read(self, lease: Lease, names: tuple[str, ...]) -> int:
        """Touch every value. Returns the bytes."""
        nbytes = 0
        for name in names:
            values, _ = lease.rows.ragged(name)
            total = values.sum()
            nbytes += values.nbytes
            if name == "response_ids":
                self.checksum += int(total)
        return nbytes

    def _answer(self, start: float, nbytes: int) -> Request:
        ended = time.monotonic()  # the same clock in every process of a machine
        answer = {"rows": self.rows, "seconds": ended - start, "begun": start, "ended": ended, "bytes": nbytes}
        cpu_s = time.process_time() - self.cpu_s
        return {**answer, "latencies_ms": self.latencies, "checksum": self.checksum, "cpu_s": cpu_s}


class Side:
    """The processes of this side, four that stay; `stages` has a store that stays, too."""

    def __init__(self) -> None:
        self.count = 0
        self.workers = [ray.remote(num_cpus=0)(Worker).remote() for _ in range(4)]
        self.kept: Any = None

    async def run(self, request: Request) -> Request:
        try:
            return await asyncio.wait_for(getattr(self, request["op"])(self.workers, request), DEADLINE_S)
        except TimeoutError:
            return {"error": f"not done after {DEADLINE_S:g} s"}

    async def put(self, workers: list[Any], request: Request) -> Request:
        store = await self._new_store(request, workers[:1])
        try:
            await reside(StoreClient(store), request, True)
            return dict(await workers[0].put.remote(True))
        finally:
            end_store_actor(store)

    async def lease(self, workers: list[Any], request: Request) -> Request:
        store = await self._new_store(request, workers[:2])
        try:
            await workers[0].put.remote(True)
            await reside(StoreClient(store), request, True)
            return checked(request, await workers[1].lease.remote())
        finally:
            end_store_actor(store)

    async def stages(self, workers: list[Any], request: Request) -> Request:
        if self.kept is None:
            self.kept = await self._new_store(request, workers)
            self.client = StoreClient(self.kept)
            await reside(self.client, request, False)
        else:
            await self._begin(self.kept, request, workers, False)
        producer, *stages = workers
        before = await self._store_cpu_s()
        running = [getattr(worker, role).remote() for worker, role in zip(stages, ROLES[1:], strict=True)]
        answers = await asyncio.gather(producer.put.remote(False), *running)
        cpu_s = {role: answer["cpu_s"] for role, answer in zip(ROLES, answers, strict=True)}
        cpu_s["store"] = await self._store_cpu_s() - before
        put, _, *read = answers
        return {**checked(request, *read), "seconds": read[-1]["ended"] - put["begun"], "cpu_s": cpu_s}

    async def _store_cpu_s(self) -> float:
        return float((await self.client.describe())["process"]["cpu_s"])

    async def raw(self, workers: list[Any], request: Request) -> Request:
        await asyncio.gather(*(worker.raw_begin.remote(request) for worker in workers[1:]))
        writer, reward, train = workers[1:]
        return dict(await writer.raw_write.remote([(reward, 1), (train, 2)]))

    async def alone(self, workers: list[Any], request: Request) -> Request:
        """Run after `raw`, with the same batches."""
        return dict(await workers[1].raw_alone.remote())

    async def _new_store(self, request: Request, workers: list[Any]) -> Any:
        self.count += 1
        store = create_store_actor(make_spec(request), f"bench-{self.count}")
        await self._begin(store, request, workers, True)
        return store

    async def _begin(self, store: Any, request: Request, workers: list[Any], is_new: bool) -> None:
        await asyncio.gather(*(worker.begin.remote(store, request, is_new) for worker in workers))


def checked(request: Request, *read: Request) -> Request:
    """Return the last answer, if every process has read what was written."""
    expected = Responses(request).checksum
    for answer in read:
        if answer["checksum"] != expected:
            return {"error": f"response_ids sum to {answer['checksum']}, {expected} where they were made"}
    return dict(read[-1])


async def reside(client: StoreClient, request: Request, with_response: bool) -> None:
    """Put rows that stay."""
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

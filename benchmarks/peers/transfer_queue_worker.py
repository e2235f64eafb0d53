"""The processes of TransferQueue's side of the store benchmark: the rows of a request, and an actor with a client.

`transfer_queue.py` says what the operations are. Imports nothing of this project.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

import numpy as np
import ray
import torch
from tensordict import TensorDict

STEP_ROWS = 64
"""Number of rows of a partition."""
PROMPT_TOKENS = 32
VOCABULARY = 32_000
RESIDENT_CHUNK = 10_000
PUT_COLUMNS = ["prompt_ids", "response_ids", "behavior_logprobs"]
STAGES = {  # task -> columns that it reads, columns that it writes; the last clears
    "rollout": (["prompt_ids"], ["response_ids", "behavior_logprobs"]),
    "reward": (["response_ids"], ["reward"]),
    "train": (["response_ids", "behavior_logprobs", "reward"], []),
}


class Rows:
    """The rows of a request: one flat array per column, and how to cut it into batches."""

    def __init__(self, request: dict[str, Any]) -> None:
        generator = np.random.default_rng(request["seed"])
        self.num_rows, self._batch = request["rows"], request["batch"]
        lengths = generator.integers(request["min_tokens"], request["max_tokens"] + 1, self.num_rows)
        self._offsets = np.concatenate([[0], np.cumsum(lengths)])
        self.num_tokens = int(self._offsets[-1])
        self._response_ids = torch.from_numpy(generator.integers(0, VOCABULARY, self.num_tokens, dtype=np.int32))
        self._behavior_logprobs = torch.from_numpy(-generator.random(self.num_tokens, dtype=np.float32))
        self._prompt_ids = prompts(generator, self.num_rows)

    @property
    def checksum(self) -> int:
        return int(self._response_ids.sum(dtype=torch.int64))

    @property
    def sizes(self) -> list[int]:
        return [min(self._batch, self.num_rows - first) for first in range(0, self.num_rows, self._batch)]

    def batches(self, columns: list[str]) -> list[TensorDict]:
        """TensorDicts of `batch` rows; columns of varying length are strided nested tensors."""
        bounds = itertools.pairwise(itertools.accumulate(self.sizes, initial=0))
        return [TensorDict({c: self._cut(c, *bound) for c in columns}, bound[1] - bound[0]) for bound in bounds]

    def _cut(self, column: str, first: int, last: int) -> torch.Tensor:
        if column == "prompt_ids":
            return self._prompt_ids[first:last]
        if column == "reward":
            return torch.ones(last - first)
        flat = self._response_ids if column == "response_ids" else self._behavior_logprobs
        rows = [flat[begin:end] for begin, end in itertools.pairwise(self._offsets[first : last + 1].tolist())]
        return rows[0][None] if len(rows) == 1 else torch.nested.as_nested_tensor(rows, layout=torch.strided)


def partitions(request: dict[str, Any]) -> list[str]:
    """Partitions of each batch: one a step, as verl has them; a new round has new ones."""
    firsts = range(0, request["rows"], request["batch"])
    return [f"train_{request['seed']}_{first // STEP_ROWS}" for first in firsts]


def prompts(generator: np.random.Generator, num_rows: int) -> torch.Tensor:
    return torch.from_numpy(generator.integers(0, VOCABULARY, (num_rows, PROMPT_TOKENS), dtype=np.int32))


async def at_most(limit: int, jobs: Iterable[Callable[[], Coroutine[Any, Any, None]]]) -> None:
    """Await the jobs, begun in their order, at most `limit` of them at a time."""
    queue = iter(jobs)

    async def work() -> None:
        for job in queue:
            await job()

    async with asyncio.TaskGroup() as group:
        for _ in range(limit):
            group.create_task(work())


@ray.remote(num_cpus=0.5, max_restarts=0)
class Worker:
    """A process with a TransferQueue client, whose connections belong to the actor's one event loop.

    Lifecycle: `connect`; for each operation `prepare`, untimed, then one of `put`, `lease`, `stage`; `clear`.
    """

    async def connect(self, config: dict[str, Any] | None) -> None:
        """Start TransferQueue if a configuration is given, and attach to it."""
        import transfer_queue
        from omegaconf import OmegaConf

        transfer_queue.init(OmegaConf.create(config) if config else None)
        self._client = transfer_queue.get_client()

    async def prepare(self, request: dict[str, Any], columns: list[str]) -> None:
        rows = Rows(request)
        self._sizes = rows.sizes
        self._partitions = partitions(request)
        self._batches = rows.batches(columns) if columns else []
        self._poll_s = request["poll_ms"] / 1e3
        self._turn = asyncio.Lock()
        self._latencies_ms: list[float] = []
        self._trained: Counter[str] = Counter()
        self._checksum: int | None = None
        self._num_empty_polls = 0

    async def put(self, in_flight: int) -> dict[str, Any]:
        async def one(batch: TensorDict, partition: str) -> None:
            begun = time.monotonic()
            await self._client.async_put(batch, partition_id=partition)
            self._latencies_ms.append((time.monotonic() - begun) * 1e3)

        jobs = zip(self._batches, self._partitions, strict=True)
        return await self._timed(in_flight, (lambda job=job: one(*job) for job in jobs))

    async def lease(self, in_flight: int) -> dict[str, Any]:
        async def one(size: int, partition: str) -> None:
            begun = time.monotonic()
            meta = await self._take("lease", PUT_COLUMNS, size, partition)
            self._read(await self._client.async_get_data(meta))
            self._latencies_ms.append((time.monotonic() - begun) * 1e3)

        jobs = zip(self._sizes, self._partitions, strict=True)
        return await self._timed(in_flight, (lambda job=job: one(*job) for job in jobs))

    async def stage(self, task: str, in_flight: int) -> dict[str, Any]:
        reads, writes = STAGES[task]

        async def one(number: int, size: int) -> None:
            partition = self._partitions[number]
            meta = await self._take(task, reads, size, partition)
            self._read(await self._client.async_get_data(meta))
            if writes:
                await self._client.async_put(self._batches[number], metadata=meta)
                return
            self._trained[partition] += 1
            if self._trained[partition] == self._partitions.count(partition):
                await self._client.async_clear_partition(partition)

        return await self._timed(in_flight, (lambda job=job: one(*job) for job in enumerate(self._sizes)))

    async def clear(self) -> None:
        """Remove the rows that `put` put."""
        for partition in dict.fromkeys(self._partitions):
            await self._client.async_clear_partition(partition)

    async def put_residents(self, num_rows: int) -> None:
        for first in range(0, num_rows, RESIDENT_CHUNK):
            size = min(RESIDENT_CHUNK, num_rows - first)
            data = TensorDict({"prompt_ids": prompts(np.random.default_rng(first), size)}, size)
            partition = f"resident_{first}"
            await self._client.async_put(data, partition_id=partition)
            await self._client.async_get_meta(["prompt_ids"], size, partition, task_name="rollout")

    async def _take(self, task: str, columns: list[str], size: int, partition: str) -> Any:
        """Metadata of the next `size` ready rows. One caller of this process polls at a time."""
        async with self._turn:
            while True:
                meta = await self._client.async_get_meta(columns, size, partition, task_name=task)
                if meta.size:
                    return meta
                self._num_empty_polls += 1
                await asyncio.sleep(self._poll_s)

    def _read(self, data: TensorDict) -> None:
        if "response_ids" in data:
            self._checksum = (self._checksum or 0) + int(data["response_ids"].values().sum(dtype=torch.int64))

    async def _timed(self, in_flight: int, jobs: Iterable[Callable[[], Coroutine[Any, Any, None]]]) -> dict[str, Any]:
        begun = time.monotonic()  # the same clock in every process of a machine
        await at_most(in_flight, jobs)
        return {
            "begun": begun,
            "ended": time.monotonic(),
            "latencies_ms": self._latencies_ms,
            "checksum": self._checksum,
            "empty_polls": self._num_empty_polls,
        }

#!/usr/bin/env python3
"""TransferQueue on the store benchmark's workload, one operation per request.

Run it with the Python of the environment that `requirements/tq.lock` describes. It imports nothing of this project:
the benchmark starts it as a child process and talks to it in lines of JSON.

    out  {"ready": true, "versions": {...}, "settings": {...}}
    in   {"case": "a", "op": "put", "rows": N, "batch": B, "min_tokens": lo, "max_tokens": hi, "resident": R, "seed": s}
    out  {"case": "a", "op": "put", "rows": n, "seconds": s, "bytes": b, "latencies_ms": [...], ...}
    out  {"case": "a", "op": "put", "error": "..."}    failed, or over --deadline; the next request starts it anew
    in   (end of file)                                 stop

A row has prompt_ids (32 int32), response_ids (int32) and behavior_logprobs (float32) of equal length, uniform in
[min_tokens, max_tokens], and reward (float32). `bytes` are the rows' own: of all four columns for `stages`, of the
first three otherwise. Everything is generated and cut into TensorDicts before the clock starts.

    put      one process puts the first three columns. Latencies: of each put call
    lease    rows were put before; one process gets those columns, batch by batch, and sums response_ids.
             Latencies: of each batch, from asking for its metadata to the sum
    stages   four processes at once. A producer puts prompts; `rollout` reads prompt_ids and writes response_ids and
             behavior_logprobs; `reward` reads response_ids and writes reward; `train` reads all but the prompts and
             clears the rows. From the first put to the end of the last clear; no latencies

In calls of TransferQueue 0.1.11: `async_put(partition_id=)` inserts rows, `async_get_meta(task_name=)` takes ready rows
that the task has not consumed, `async_get_data` reads them, `async_put(metadata=)` adds columns to them,
`async_clear_samples` removes them. A process awaits up to `in_flight` batches at a time in one event loop, so a latency
holds what a call waits for the others: {"in_flight": 1} in a request gives that of a call alone.

`resident` rows lie in the same partition, have prompt_ids only, and the task `rollout` has consumed them: rows that are
being generated elsewhere. No task finds them ready. They stay between requests; a request with another number of them
starts TransferQueue anew, because its tables never shrink. So give such a case a child of its own.

The controller runs in its polling mode, which it recommends for streaming: without, a request for rows that are not
there yet puts its only thread to sleep for 5 s. Tried on two cores, a few runs each, and kept where faster:

    storage units          1: stages at 2.0 k rows/s where 2 units gave 1.5 k and 4 fewer; no difference to 2 elsewhere
    columns of varying     strided nested tensors, and a plain one for a single row: 1.5 times the puts of jagged ones,
    length                 which are unbound in Python, several times per put; reads return jagged ones either way
    batches in flight      4, as many as its pools keep connections: 1.2 to 2 times the rows/s of 1, on every operation
    pause after a poll     10 ms; 2 to 50 ms are the same within the noise, 100 ms is slower
    TQ_NUM_THREADS         1; 2 makes no difference, and more than there are cores logs a warning in each call
    TQ_CLIENT_ZMQ_IO_THREADS   2; 1 and 8 make no difference
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Coroutine, Iterable
from importlib.metadata import version
from typing import Any

import numpy as np
import ray
import torch
from tensordict import TensorDict

PARTITION = "train"
PROMPT_TOKENS = 32
VOCABULARY = 32_000
RESIDENT_CHUNK = 10_000
PUT_COLUMNS = ["prompt_ids", "response_ids", "behavior_logprobs"]
STAGES = {  # task -> columns that it reads, columns that it writes; the last clears
    "rollout": (["prompt_ids"], ["response_ids", "behavior_logprobs"]),
    "reward": (["response_ids"], ["reward"]),
    "train": (["response_ids", "behavior_logprobs", "reward"], []),
}


class Protocol:
    """Lines of JSON on what were standard input and output when the program started."""

    def __init__(self) -> None:
        # Nothing else may write to the channel: file descriptor 1 becomes standard error.
        self._out = os.fdopen(os.dup(1), "w", buffering=1)
        os.dup2(2, 1)
        sys.stdout = sys.stderr

    def send(self, message: dict[str, Any]) -> None:
        self._out.write(json.dumps(message) + "\n")
        self._out.flush()

    def requests(self) -> Iterable[dict[str, Any]]:
        return (json.loads(line) for line in iter(sys.stdin.readline, "") if line.strip())


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


def prompts(generator: np.random.Generator, num_rows: int) -> torch.Tensor:
    return torch.from_numpy(generator.integers(0, VOCABULARY, (num_rows, PROMPT_TOKENS), dtype=np.int32))


async def at_most(limit: int, jobs: Iterable[Callable[[], Coroutine[Any, Any, None]]]) -> None:
    """Awaits the jobs, begun in their order, at most `limit` of them at a time."""
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
        """Starts TransferQueue if a configuration is given, and attaches to it."""
        import transfer_queue
        from omegaconf import OmegaConf

        transfer_queue.init(OmegaConf.create(config) if config else None)
        self._client = transfer_queue.get_client()

    async def prepare(self, request: dict[str, Any], columns: list[str]) -> None:
        rows = Rows(request)
        self._sizes = rows.sizes
        self._batches = rows.batches(columns) if columns else []
        self._poll_s = request["poll_ms"] / 1e3
        self._turn = asyncio.Lock()
        self._latencies_ms: list[float] = []
        self._metas: list[Any] = []
        self._checksum: int | None = None
        self._num_empty_polls = 0

    async def put(self, in_flight: int) -> dict[str, Any]:
        async def one(batch: TensorDict) -> None:
            begun = time.monotonic()
            self._metas.append(await self._client.async_put(batch, partition_id=PARTITION))
            self._latencies_ms.append((time.monotonic() - begun) * 1e3)

        return await self._timed(in_flight, (lambda batch=batch: one(batch) for batch in self._batches))

    async def lease(self, in_flight: int) -> dict[str, Any]:
        async def one(size: int) -> None:
            begun = time.monotonic()
            meta = await self._take("lease", PUT_COLUMNS, size)
            self._read(await self._client.async_get_data(meta))
            self._latencies_ms.append((time.monotonic() - begun) * 1e3)

        return await self._timed(in_flight, (lambda size=size: one(size) for size in self._sizes))

    async def stage(self, task: str, in_flight: int) -> dict[str, Any]:
        reads, writes = STAGES[task]

        async def one(number: int, size: int) -> None:
            meta = await self._take(task, reads, size)
            self._read(await self._client.async_get_data(meta))
            if writes:
                await self._client.async_put(self._batches[number], metadata=meta)
            else:
                await self._client.async_clear_samples(meta)

        return await self._timed(in_flight, (lambda job=job: one(*job) for job in enumerate(self._sizes)))

    async def clear(self) -> None:
        """Removes the rows that `put` put."""
        await at_most(4, (lambda meta=meta: self._client.async_clear_samples(meta) for meta in self._metas))
        self._metas = []

    async def put_residents(self, num_rows: int) -> None:
        for first in range(0, num_rows, RESIDENT_CHUNK):
            size = min(RESIDENT_CHUNK, num_rows - first)
            data = TensorDict({"prompt_ids": prompts(np.random.default_rng(first), size)}, size)
            await self._client.async_put(data, partition_id=PARTITION)
            await self._client.async_get_meta(["prompt_ids"], size, PARTITION, task_name="rollout")

    async def _take(self, task: str, columns: list[str], size: int) -> Any:
        """Metadata of the next `size` ready rows. One caller of this process polls at a time."""
        async with self._turn:
            while True:
                meta = await self._client.async_get_meta(columns, size, PARTITION, task_name=task)
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


class System:
    """Ray, TransferQueue and its four clients. Lifecycle: started by the first `run`, and anew after a failure."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._arguments = arguments
        self._workers: list[Any] = []
        self._num_resident = 0

    def run(self, request: dict[str, Any]) -> dict[str, Any]:
        """The answer to a request, an error where there is no result in time."""
        label = {name: request.get(name) for name in ("case", "op")}
        defaults = {name: getattr(self._arguments, name) for name in ("in_flight", "poll_ms")} | {"resident": 0}
        request = defaults | request
        operations = {"put": self._put, "lease": self._lease, "stages": self._stages}
        if request["op"] not in operations:
            return label | {"error": f"op is {request['op']!r}, not one of {', '.join(operations)}"}
        try:
            self.start(request["resident"])
            self._due = time.monotonic() + self._arguments.deadline
            return label | operations[request["op"]](request)
        except ray.exceptions.GetTimeoutError:
            self.stop()
            return label | {"error": f"no result within {self._arguments.deadline:g} s"}
        except ray.exceptions.RayError as error:
            self.stop()
            return label | {"error": str(error).strip().splitlines()[-1]}

    def start(self, num_resident: int) -> None:
        if self._workers and num_resident == self._num_resident:
            return
        self.stop()
        self._due = time.monotonic() + self._arguments.deadline
        # TransferQueue's controller and storage units ask for a CPU each; with fewer free ones its init never returns.
        ray.init(
            address="local",
            num_cpus=8,
            include_dashboard=False,
            _node_ip_address="127.0.0.1",
            object_store_memory=100 * 2**20,
            log_to_driver=self._arguments.log,
        )
        self._workers = [Worker.remote() for _ in range(4)]
        config = {
            "controller": {"polling_mode": True},
            "backend": {"SimpleStorage": {"num_data_storage_units": self._arguments.units}},
        }
        producer, *others = self._workers
        self._get(producer.connect.remote(config))
        self._get([worker.connect.remote(None) for worker in others])
        self._get(producer.put_residents.remote(num_resident))
        self._num_resident = num_resident

    def stop(self) -> None:
        self._workers = []
        ray.shutdown()

    def _put(self, request: dict[str, Any]) -> dict[str, Any]:
        producer, in_flight = self._workers[0], request["in_flight"]
        self._get(producer.prepare.remote(request, PUT_COLUMNS))
        measured = self._get(producer.put.remote(in_flight))
        self._get(producer.clear.remote())
        return self._answer(request, [measured], row_bytes=0)

    def _lease(self, request: dict[str, Any]) -> dict[str, Any]:
        producer, consumer = self._workers[:2]
        self._get([producer.prepare.remote(request, PUT_COLUMNS), consumer.prepare.remote(request, [])])
        self._get(producer.put.remote(4))
        measured = self._get(consumer.lease.remote(request["in_flight"]))
        self._get(producer.clear.remote())
        return self._answer(request, [measured], row_bytes=0)

    def _stages(self, request: dict[str, Any]) -> dict[str, Any]:
        producer, *others = self._workers
        stages = list(zip(others, STAGES.items(), strict=True))
        self._get(
            [producer.prepare.remote(request, ["prompt_ids"])]
            + [worker.prepare.remote(request, writes) for worker, (_, (_, writes)) in stages]
        )
        in_flight = request["in_flight"]
        running = [worker.stage.remote(task, in_flight) for worker, (task, _) in stages]
        measured = self._get([producer.put.remote(in_flight), *running])
        measured[0]["latencies_ms"] = []
        return self._answer(request, measured, row_bytes=4)

    def _answer(self, request: dict[str, Any], measured: list[dict[str, Any]], row_bytes: int) -> dict[str, Any]:
        rows = Rows(request)
        sums = {m["checksum"] for m in measured} - {None}
        if not sums <= {rows.checksum}:
            return {"error": f"response_ids sum to {sums} where they were read, {rows.checksum} where they were made"}
        return {
            "rows": rows.num_rows,
            "seconds": measured[-1]["ended"] - measured[0]["begun"],
            "bytes": rows.num_rows * (PROMPT_TOKENS * 4 + row_bytes) + rows.num_tokens * 8,
            "latencies_ms": [round(latency, 3) for m in measured for latency in m["latencies_ms"]],
            "empty_polls": sum(m["empty_polls"] for m in measured),
            "in_flight": request["in_flight"],
        }

    def _get(self, references: Any) -> Any:
        return ray.get(references, timeout=max(0.0, self._due - time.monotonic()))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="TransferQueue on the store benchmark's workload.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--deadline", type=float, default=120.0, help="seconds for one request")
    parser.add_argument("--log", action="store_true", help="what the actors print, on standard error")
    speed = parser.add_argument_group("settings which only change the speed (default: the fastest of those tried)")
    speed.add_argument("--units", type=int, default=1, help="storage units")
    speed.add_argument("--in-flight", type=int, default=4, help="batches that a process works on at a time")
    speed.add_argument("--poll-ms", type=float, default=10.0, help="pause after a poll that found too few rows")
    speed.add_argument("--threads", type=int, default=1, help="TQ_NUM_THREADS: threads of torch in puts and gets")
    speed.add_argument("--io-threads", type=int, default=2, help="TQ_CLIENT_ZMQ_IO_THREADS: of each client")
    return parser.parse_args()


def main() -> int:
    arguments = parse_arguments()
    # Ray's processes inherit these. Each limits what it names to what two cores can use.
    os.environ |= {
        "RAY_worker_niceness": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "TQ_NUM_THREADS": str(arguments.threads),
        "TQ_CLIENT_ZMQ_IO_THREADS": str(arguments.io_threads),
    }
    # Ray would put this file's folder on the path of its workers, where `import transfer_queue` would find this file.
    folder = os.path.dirname(os.path.realpath(__file__))
    sys.path[:] = [entry for entry in sys.path if os.path.realpath(entry) != folder]
    protocol = Protocol()
    system = System(arguments)
    system.start(0)
    names = ("units", "in_flight", "poll_ms", "threads", "io_threads")
    protocol.send(
        {
            "ready": True,
            "versions": {name: version(name) for name in ("TransferQueue", "tensordict", "torch", "ray")},
            "settings": {name: getattr(arguments, name) for name in names},
        }
    )
    try:
        for request in protocol.requests():
            protocol.send(system.run(request))
    finally:
        system.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""TransferQueue on the store benchmark's workload, one operation per request.

It runs with the Python of the environment that `requirements/tq.lock` describes, so of this project it imports its
neighbours alone: `channel.py`, and `transfer_queue_worker.py`, whose actors are the processes below.

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
`async_clear_partition` removes them. A process awaits up to `in_flight` batches at a time in one event loop, so a
latency holds what a call waits for the others: {"in_flight": 1} in a request gives that of a call alone.

Rows lie as verl lays them: each step of 64 has a partition of its own (`train_<step>`), which is cleared as a whole
once it is trained. `resident` rows lie in other partitions, have prompt_ids only, and the task `rollout` has consumed
them: rows that are being generated elsewhere. They stay between requests; a request with another number of them starts
TransferQueue anew. So give such a case a child of its own.

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
import os
import time
from importlib.metadata import version
from typing import Any

import ray

from benchmarks.peers.channel import Channel
from benchmarks.peers.transfer_queue_worker import PROMPT_TOKENS, PUT_COLUMNS, STAGES, Rows, Worker

START_S = 600.0
"""Deadline of a start, in seconds: six processes import torch, which takes minutes where others use the cores."""


class System:
    """Ray, TransferQueue and its four clients. Lifecycle: started by the first `run`, and anew after a failure."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._arguments = arguments
        self._workers: list[Any] = []
        self._num_resident = 0

    def run(self, request: dict[str, Any]) -> dict[str, Any]:
        """Answer a request, with an error where there is no result in time."""
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
        self._due = time.monotonic() + START_S
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


def main() -> None:
    arguments = parse_arguments()
    # Ray's processes inherit these. Each limits what it names to what two cores can use.
    os.environ |= {
        "RAY_worker_niceness": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "TQ_NUM_THREADS": str(arguments.threads),
        "TQ_CLIENT_ZMQ_IO_THREADS": str(arguments.io_threads),
    }
    channel = Channel()
    system = System(arguments)
    system.start(0)
    names = ("units", "in_flight", "poll_ms", "threads", "io_threads")
    channel.send(
        {
            "ready": True,
            "versions": {name: version(name) for name in ("TransferQueue", "tensordict", "torch", "ray")},
            "settings": {name: getattr(arguments, name) for name in names},
        }
    )
    try:
        for request in channel.requests():
            channel.send(system.run(request))
    finally:
        system.stop()


if __name__ == "__main__":
    main()

"""A FSDP2 rank of the weights benchmark: publishes through shared memory, or the naive way.

    in   {"op": "tidy"}                                 both ranks at once: collects garbage, and meets the other
    in   {"op": "publish", "root": DIR, "version": v}   both at once: every rank its shard into the publication
    in   {"op": "gather", "bucket": i}                  both at once: a bucket of parameters, cast to the engine's type,
                                                        gathered on rank 0, which puts it into Ray's object store
    in   {"op": "memcpy", "bytes": n}                   warm pages, by one thread and by two
    out  {"seconds": s, ...}

A bucket is one flat array, which Ray neither pickles nor copies more than once, with the name, shape and place of each
tensor. Its buffers stay from one publication to the next, and so do their pages. The trainer has no optimizer state: it
makes no step. There is one process a rank.
"""

import argparse
import base64
import gc
import os
import statistics
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

os.environ.setdefault("RAY_worker_niceness", "0")

import numpy as np
import ray
import torch
import torch.distributed

from benchmarks.peers.channel import Channel
from penstock.conf.trainer import TrainerConfig
from penstock.workers.trainer.policy_trainer import PolicyTrainer
from penstock.workers.trainer.ranks import Ranks

Named = tuple[str, torch.Tensor]


def buckets_of(named: Sequence[Named], most: int) -> list[list[Named]]:
    """Cut tensors into buckets, in order: as many to a bucket as have so many elements together, at least one."""
    buckets: list[list[Named]] = []
    size = most
    for name, tensor in named:
        if size + tensor.numel() > most:
            buckets.append([])
            size = 0
        buckets[-1].append((name, tensor))
        size += tensor.numel()
    return buckets


class Gatherer:
    """Buckets of a sharded model, whole on rank 0. Every rank calls `gather` with the same numbers.

    By messages from rank to rank: gloo takes 5 times as long to gather 64 MB from two ranks, and 10 times for what most
    people write, `full_tensor()`, which brings all to all.
    """

    def __init__(
        self, model: torch.nn.Module, dtype: torch.dtype, rank: int, num_ranks: int, bucket_bytes: int
    ) -> None:
        named = [(name.removeprefix("lm."), tensor) for name, tensor in model.named_parameters()]
        self.buckets = buckets_of(named, bucket_bytes // dtype.itemsize)
        longest = max(sum(tensor.numel() for _, tensor in bucket) for bucket in self.buckets)
        self._shard = torch.empty(longest // num_ranks, dtype=dtype)
        self._others = [torch.empty_like(self._shard) for _ in range(num_ranks - 1 if rank == 0 else 0)]
        self._whole = torch.empty(longest if rank == 0 else 0, dtype=dtype)

    def gather(self, number: int) -> tuple[np.ndarray, list[tuple[str, tuple[int, ...], int]]] | None:
        """Gather a bucket: its bytes, and each tensor's name, shape and first element; None on the other ranks."""
        bucket = self.buckets[number]
        end = 0
        for _, tensor in bucket:
            local = tensor.to_local().flatten()  # the cast is the copy's
            self._shard[end : end + local.numel()].copy_(local)
            end += local.numel()
        if not self._others:
            torch.distributed.send(self._shard[:end], 0)
            return None
        for rank, shard in enumerate(self._others, 1):
            torch.distributed.recv(shard[:end], rank)
        return self._joined(bucket)

    def _joined(self, bucket: Sequence[Named]) -> tuple[np.ndarray, list[tuple[str, tuple[int, ...], int]]]:
        """Join the shards of a bucket. FSDP2 shards rows, here as many to each rank."""
        shards = [self._shard, *self._others]
        places, at = [], 0
        for name, tensor in bucket:
            size, share = tensor.numel(), tensor.numel() // len(shards)
            begin = at // len(shards)
            for number, shard in enumerate(shards):
                first = at + number * share
                self._whole[first : first + share] = shard[begin : begin + share]
            places.append((name, tuple(tensor.shape), at))
            at += size
        return self._whole[:at].view(torch.uint8).numpy(), places


class Rank:
    def __init__(self, arguments: argparse.Namespace) -> None:
        torch.set_num_threads(1)
        ranks = Ranks.join(TrainerConfig(), arguments.rank, arguments.num_ranks, arguments.address)
        self.trainer = PolicyTrainer(TrainerConfig(), arguments.model, ranks, engine_dtype=arguments.dtype)
        self._gatherer = Gatherer(
            self.trainer.model,
            getattr(torch, arguments.dtype),
            arguments.rank,
            arguments.num_ranks,
            arguments.bucket_bytes,
        )
        self._references: deque[Any] = deque(maxlen=2)
        """References to the bucket that the engine loads, and to the next one."""
        if arguments.rank == 0:
            ray.init(arguments.ray, namespace="weights", log_to_driver=False, logging_level="ERROR")

    def tidy(self, request: dict[str, Any]) -> dict[str, Any]:
        """Collect garbage, so that neither side pays for what the other has left."""
        gc.collect()
        self._references.clear()
        self.trainer.ranks.barrier()
        return {"seconds": 0.0, "buckets": len(self._gatherer.buckets)}

    def publish(self, request: dict[str, Any]) -> dict[str, Any]:
        self.trainer.ranks.barrier()  # no rank's clock runs while the other one has not heard yet
        start = time.perf_counter()
        publication = self.trainer.publish(request["root"], request["version"])
        seconds = time.perf_counter() - start
        return {
            "seconds": seconds,
            "info": {"directory": publication.directory, "version": publication.version},
            "bytes": publication.num_bytes,
        }

    def gather(self, request: dict[str, Any]) -> dict[str, Any]:
        self.trainer.ranks.barrier()
        start = time.perf_counter()
        gathered = self._gatherer.gather(request["bucket"])
        answer: dict[str, Any] = {}
        if gathered is not None:
            content, places = gathered
            self._references.append(ray.put(content))
            packed = ray.cloudpickle.dumps((self._references[-1], places))
            answer = {"info": {"bucket": base64.b64encode(packed).decode()}, "bytes": content.nbytes}
        return answer | {"seconds": time.perf_counter() - start}

    def memcpy(self, request: dict[str, Any]) -> dict[str, Any]:
        source, target = (np.zeros(request["bytes"], np.uint8) for _ in range(2))
        source[:] = 1
        target[:] = 2
        return {
            f"seconds_{threads}": statistics.median(_copy(source, target, threads) for _ in range(5))
            for threads in (1, 2)
        }


def _copy(source: np.ndarray, target: np.ndarray, num_threads: int) -> float:
    parts = list(zip(np.array_split(target, num_threads), np.array_split(source, num_threads), strict=True))
    threads = [threading.Thread(target=np.copyto, args=part) for part in parts]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--num-ranks", type=int, required=True)
    parser.add_argument("--bucket-bytes", type=int, required=True)
    for name in ("--model", "--address", "--dtype", "--ray"):
        parser.add_argument(name, required=True)
    channel = Channel()
    torch.set_num_threads(1)
    rank = Rank(parser.parse_args())
    operations = {"tidy": rank.tidy, "publish": rank.publish, "gather": rank.gather, "memcpy": rank.memcpy}
    channel.send({"ready": True, "pid": os.getpid()})
    for request in channel.requests():
        channel.send(operations[request["op"]](request))
    rank.trainer.close()


if __name__ == "__main__":
    main()

"""One FSDP2 rank of the weights benchmark: publishes through shared memory, or the way people write first.

    in   {"op": "publish", "root": DIR, "version": v}   both ranks at once: every rank its shard into the publication
    in   {"op": "gather", "version": v}                 both at once: whole state dict on rank 0, which puts it into Ray
    in   {"op": "memcpy", "bytes": n}                   warm pages, by one thread and by two
    out  {"seconds": s, ...}

The trainer has no optimizer state: it makes no step. Started by `benchmarks/weights.py`, one process a rank.
"""

import argparse
import base64
import gc
import os
import statistics
import threading
import time
from typing import Any

os.environ.setdefault("RAY_worker_niceness", "0")

import numpy as np
import ray
import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from benchmarks.peers.channel import Channel
from penstock.conf.trainer import TrainerConfig
from penstock.workers.trainer.trainer import PolicyTrainer


class Rank:
    def __init__(self, arguments: argparse.Namespace) -> None:
        self.trainer = PolicyTrainer(
            TrainerConfig(),
            arguments.model,
            rank=arguments.rank,
            num_ranks=arguments.num_ranks,
            address=arguments.address,
            num_threads=1,
            engine_dtype=arguments.dtype,
        )
        self._is_first = arguments.rank == 0
        self._reference: Any = None
        if self._is_first:
            ray.init(arguments.ray, namespace="weights", log_to_driver=False, logging_level="ERROR")

    def publish(self, request: dict[str, Any]) -> dict[str, Any]:
        self._begin_together()
        start = time.perf_counter()
        publication = self.trainer.publish(request["root"], request["version"])
        seconds = time.perf_counter() - start
        return {
            "seconds": seconds,
            "info": {"directory": publication.directory, "version": publication.version},
            "bytes": publication.num_bytes,
        }

    def gather(self, request: dict[str, Any]) -> dict[str, Any]:
        """`full_state_dict` on rank 0 and `ray.put` of it, as it comes: float32."""
        self._reference = None
        self._begin_together()
        start = time.perf_counter()
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        weights = get_model_state_dict(self.trainer.model, options=options)
        answer: dict[str, Any] = {}
        if self._is_first:
            named = {name.removeprefix("lm."): tensor for name, tensor in weights.items()}
            named.pop("lm_head.weight", None)  # tied to the embedding
            self._reference = ray.put(named)
            packed = ray.cloudpickle.dumps(self._reference)
            answer["info"] = {"reference": base64.b64encode(packed).decode(), "version": request["version"]}
        return answer | {"seconds": time.perf_counter() - start}

    def _begin_together(self) -> None:
        """Neither side pays for what the other has left, and no rank's clock runs while another one tidies up."""
        gc.collect()
        self.trainer.ranks.barrier()

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
    for name in ("--model", "--address", "--dtype", "--ray"):
        parser.add_argument(name, required=True)
    channel = Channel()
    torch.set_num_threads(1)
    rank = Rank(parser.parse_args())
    operations = {"publish": rank.publish, "gather": rank.gather, "memcpy": rank.memcpy}
    channel.send({"ready": True, "pid": os.getpid()})
    for request in channel.requests():
        channel.send(operations[request["op"]](request))
    rank.trainer.close()


if __name__ == "__main__":
    main()

"""Cost of a call of an actor to its caller with Ray: the same calls as the simulated fleet's, to a few real actors.

    python -m benchmarks.controller.ray_calls

prints a line of JSON. CPU seconds are of the driver's process, Ray's own threads among them; actors are in others.
"""

import asyncio
import json
import os
import statistics
import time

os.environ.setdefault("RAY_worker_niceness", "0")

import ray

from penstock.orchestrator.cluster.ray_calls import outcomes
from penstock.workers.runtime.serving import SERVING, Progress

NUM_CALLS, NUM_ACTORS, ROUNDS = 1088, 8, 12
WARM_ROUNDS = 2
TIMEOUT_S = 60.0


class Engine:
    async def progress(self) -> Progress:
        return Progress(SERVING, 1.0, 10, 2, 5)


async def measure() -> list[float]:
    """Measure CPU ms of each batch of calls."""
    actors = [ray.remote(num_cpus=0)(Engine).remote() for _ in range(NUM_ACTORS)]
    found = []
    for _ in range(WARM_ROUNDS + ROUNDS):
        began = time.process_time()
        calls = [(f"Engine-{n}", actors[n % NUM_ACTORS].progress.remote()) for n in range(NUM_CALLS)]
        said = await outcomes(calls, phase="heartbeat", timeout_s=TIMEOUT_S)
        found.append(1000 * (time.process_time() - began))
        assert all(isinstance(one, Progress) for one in said)
    return found[WARM_ROUNDS:]


def main() -> None:
    ray.init(address="local", num_cpus=1, include_dashboard=False, logging_level="ERROR", log_to_driver=False)
    batches = asyncio.run(measure())
    ray.shutdown()
    middle = statistics.median(batches)
    print(
        json.dumps(
            {"calls": NUM_CALLS, "actors": NUM_ACTORS, "batch_ms": batches, "call_us": 1000 * middle / NUM_CALLS}
        )
    )


if __name__ == "__main__":
    main()

"""The vLLM engine of the weights benchmark: takes a publication, or a state dict out of Ray's object store.

    in   {"op": "load", "directory": DIR, "version": v}              Penstock's load
    in   {"op": "load_naively", "reference": REF, "version": v}      pause, `ray.get`, vLLM's `reload_weights`, resume
    out  {"seconds": s, "pause_s": p, "phases": {...}}

The naive side gets the object by reference in the engine's own process, without a copy: kinder than a pickle through
vLLM's sockets, which is what people write. Started by `benchmarks/weights.py`.
"""

import argparse
import asyncio
import base64
import os
import time
from typing import Any

os.environ.setdefault("RAY_worker_niceness", "0")
os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # the naive side sends the engine's process a function

from benchmarks.peers.channel import Channel
from penstock.conf.rollout import RolloutConfig
from penstock.workers.protocols import Publication, Sampling
from penstock.workers.rollout.engine_vllm import VllmEngine

BEFORE_PAUSE = ("open", "prepare", "verify")


def load_from_ray(worker: Any, packed: bytes, address: str) -> dict[str, float]:
    """In the engine's process: seconds of `ray.get` and of vLLM's reload."""
    import ray
    from vllm.config import set_current_vllm_config

    if not ray.is_initialized():
        ray.init(address, namespace="weights", log_to_driver=False, logging_level="ERROR")
    start = time.perf_counter()
    weights = ray.get(ray.cloudpickle.loads(packed))
    got = time.perf_counter()
    with set_current_vllm_config(worker.vllm_config):
        worker.model_runner.reload_weights(weights_iterator=iter(weights.items()))
    return {"get": got - start, "load": time.perf_counter() - got}


class Engine:
    def __init__(self, arguments: argparse.Namespace) -> None:
        config = RolloutConfig(
            dtype=arguments.dtype,
            max_model_len=256,
            max_concurrent_samples=16,
            kv_cache_gib=0.25,
            start_timeout_s=900,
        )
        self.engine = VllmEngine(config, arguments.model, num_threads=2, phase_timeout_s=600)
        self._ray = arguments.ray

    async def load(self, request: dict[str, Any]) -> dict[str, Any]:
        start = time.perf_counter()
        await self.engine.load(Publication(request["directory"], request["version"]))
        seconds = time.perf_counter() - start
        phases = self.engine.phase_seconds
        pause = sum(value for name, value in phases.items() if name not in BEFORE_PAUSE)
        return {"seconds": seconds, "pause_s": pause, "phases": phases}

    async def load_naively(self, request: dict[str, Any]) -> dict[str, Any]:
        start = time.perf_counter()
        llm = self.engine._llm
        await llm.pause_generation(mode="keep", clear_cache=True)
        packed = base64.b64decode(request["reference"])
        (phases,) = await llm.collective_rpc(load_from_ray, args=(packed, self._ray))
        await llm.resume_generation()
        seconds = time.perf_counter() - start
        return {"seconds": seconds, "pause_s": seconds, "phases": phases}

    async def serve(self, channel: Channel) -> None:
        await self.engine.start()
        channel.send({"ready": True, "pid": os.getpid()})
        await channel.serve(self._answer)
        await self.engine.close()

    async def _answer(self, request: dict[str, Any]) -> dict[str, Any]:
        answer = await {"load": self.load, "load_naively": self.load_naively}[request["op"]](request)
        await self.engine.generate([5, 6, 7], 1, Sampling(max_tokens=2, ignore_eos=True))  # it serves on
        return answer


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("--model", "--dtype", "--ray"):
        parser.add_argument(name, required=True)
    asyncio.run(Engine(parser.parse_args()).serve(Channel()))


if __name__ == "__main__":
    main()

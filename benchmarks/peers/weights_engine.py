"""The vLLM engine of the weights benchmark: takes a publication, or buckets out of Ray's object store.

    in   {"op": "load", "directory": DIR, "version": v}              Penstock's load
    in   {"op": "load_bucket", "bucket": B, "first": b, "last": b}   `ray.get`, and vLLM's layerwise reload of
                                                                     it; paused from the first to the last
    out  {"seconds": s, "pause_s": p, "phases": {...}}
    in   {"op": "say"}
    out  {"said": [tokens]}

The naive side gets a bucket by reference in the engine's own process, where it is mapped and not copied: kinder than a
pickle through vLLM's sockets, which is what people write. A layer is repacked as soon as it is whole, while the ranks
gather the next bucket.
"""

import argparse
import asyncio
import base64
import math
import os
import time
from typing import Any

os.environ.setdefault("RAY_worker_niceness", "0")
os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # the naive side sends the engine's process a function

from benchmarks.peers.channel import Channel
from penstock.conf.rollout import RolloutConfig
from penstock.workers.protocols import EngineSpec, Publication, Sampling
from penstock.workers.rollout.engine_vllm import VllmEngine

BEFORE_PAUSE = ("open", "prepare", "verify")
PROBE = Sampling(max_tokens=8, temperature=0.0, ignore_eos=True)
"""A request whose answer shows whether the engine serves on, with the weights that it was given."""


def load_from_ray(worker: Any, packed: bytes, address: str, is_first: bool, is_last: bool) -> dict[str, float]:
    """Load a bucket in the engine's process. Returns seconds of `ray.get` and of vLLM's loading."""
    import ray
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    if not ray.is_initialized():
        ray.init(address, namespace="weights", log_to_driver=False, logging_level="ERROR")
    start = time.perf_counter()
    reference, places = ray.cloudpickle.loads(packed)
    content = torch.frombuffer(memoryview(ray.get(reference)), dtype=worker.vllm_config.model_config.dtype)
    got = time.perf_counter()
    model = worker.model_runner.get_model()
    with torch.device(worker.device), set_current_vllm_config(worker.vllm_config):
        if is_first:
            initialize_layerwise_reload(model)
        model.load_weights((name, content[at:][: math.prod(shape)].view(shape)) for name, shape, at in places)
        if is_last:
            finalize_layerwise_reload(model, worker.vllm_config.model_config)
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
        self.engine = VllmEngine(EngineSpec(config, arguments.model, num_threads=2, phase_timeout_s=600))
        self._ray = arguments.ray

    async def load(self, request: dict[str, Any]) -> dict[str, Any]:
        start = time.perf_counter()
        await self.engine.load(Publication(request["directory"], request["version"]))
        seconds = time.perf_counter() - start
        phases = self.engine.phase_seconds
        pause = sum(value for name, value in phases.items() if name not in BEFORE_PAUSE)
        return {"seconds": seconds, "pause_s": pause, "phases": phases}

    async def load_bucket(self, request: dict[str, Any]) -> dict[str, Any]:
        start = time.perf_counter()
        llm = self.engine.llm
        if request["first"]:
            await llm.pause_generation(mode="keep", clear_cache=True)
            self._paused_at = start
        packed = base64.b64decode(request["bucket"])
        arguments = (packed, self._ray, request["first"], request["last"])
        (phases,) = await llm.collective_rpc(load_from_ray, args=arguments)
        if request["last"]:
            await llm.resume_generation()
        end = time.perf_counter()
        return {"seconds": end - start, "pause_s": end - self._paused_at, "phases": phases}

    async def say(self, request: dict[str, Any]) -> dict[str, Any]:
        (said,) = await self.engine.generate([5, 6, 7], 1, PROBE)
        return {"said": said.token_ids}

    async def serve(self, channel: Channel) -> None:
        await self.engine.start()
        channel.send({"ready": True, "pid": os.getpid()})
        await channel.serve(self._answer)
        await self.engine.close()

    async def _answer(self, request: dict[str, Any]) -> dict[str, Any]:
        operations = {"load": self.load, "load_bucket": self.load_bucket, "say": self.say}
        return await operations[request["op"]](request)


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("--model", "--dtype", "--ray"):
        parser.add_argument(name, required=True)
    asyncio.run(Engine(parser.parse_args()).serve(Channel()))


if __name__ == "__main__":
    main()

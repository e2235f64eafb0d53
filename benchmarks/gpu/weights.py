"""Weights from a trainer on a GPU to a vLLM engine on a GPU, by every transport that this machine's GPUs allow.

    python -m benchmarks.gpu.weights --json gpu_weights.json

One GPU: `shm`, and `ipc` with trainer and engine sharing it. Two: `nccl` as well, the engine on the second. A random
Qwen2 of 0.5B parameters, float32 in one trainer process, bfloat16 in the engine. Each round changes the weights,
publishes them and asks the engine for log-probabilities, which are compared with the trainer's own: a transport that
loses something shows there.
"""

import asyncio
import os
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from benchmarks.gpu.machine import count_gpus, gpu_names, write_model
from benchmarks.harness import memory_folder, new_table, parse_arguments, show, write_json
from penstock.conf.rollout import RolloutConfig
from penstock.conf.weights import WeightsConfig
from penstock.workers.protocols import EngineSpec, Sampling
from penstock.workers.rollout.engine_vllm import VllmEngine
from penstock.workers.weights.engine_calls import LoopEngines
from penstock.workers.weights.publication.publication_files import reclaim
from penstock.workers.weights.weight_senders import SendingRank, StreamTransport
from tests.publications import SharedMemoryTransport

NUM_ROUNDS = 5
SCALE = 1.02
"""Factor by which all weights grow each round, so that versions differ."""
PROMPT = list(range(3, 35))
RESPONSE_TOKENS = 32
ENGINE = {"max_model_len": 1024, "max_concurrent_samples": 64, "gpu_memory_utilization": 0.3}


class Trainer:
    """The weights of one rank, without an optimizer."""

    def __init__(self, model_path: Path, device: torch.device) -> None:
        from transformers import AutoModelForCausalLM

        self.device = device
        self.lm: Any = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).to(device).eval()

    def transport(self, name: str, root: Path, dtype: str) -> StreamTransport | SharedMemoryTransport:
        if name == "shm":
            return SharedMemoryTransport(root, self.lm.named_parameters, dtype)
        rank = SendingRank(0, 1, self.device, self._pieces, lambda value: [value], self.lm, dtype)
        return StreamTransport(name, rank, bucket_mib=WeightsConfig().bucket_mib, timeout_s=120.0)

    def _pieces(self) -> Iterator[Any]:
        for name, parameter in self.lm.named_parameters():
            yield SimpleNamespace(name=name, shape=tuple(parameter.shape), first=0, values=parameter.reshape(-1))

    @torch.no_grad()
    def change(self) -> None:
        for parameter in self.lm.parameters():
            parameter.mul_(SCALE)

    @torch.no_grad()
    def mean_difference(self, response_ids: list[int], logprobs: list[float]) -> float:
        """Mean absolute difference of the engine's log-probabilities from this trainer's, per token."""
        ids = torch.tensor([PROMPT + response_ids], device=self.device)
        logits = self.lm(ids).logits[0, len(PROMPT) - 1 : -1].float()
        own = logits.log_softmax(-1).gather(1, ids[0, len(PROMPT) :, None])[:, 0].cpu()
        return float((own - torch.tensor(logprobs)).abs().mean())


@contextmanager
def visible(gpu: int | None) -> Iterator[None]:
    """Let processes that are started meanwhile see this GPU only. None: all."""
    before = os.environ.get("CUDA_VISIBLE_DEVICES")
    if gpu is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = before.split(",")[gpu] if before else str(gpu)
    try:
        yield
    finally:
        if before is None:
            os.environ.pop("CUDA_VISIBLE_DEVICES", None)
        else:
            os.environ["CUDA_VISIBLE_DEVICES"] = before


@asynccontextmanager
async def connected(
    name: str, trainer: Trainer, engine: VllmEngine, root: Path, gpu: int | None
) -> AsyncIterator[StreamTransport | SharedMemoryTransport]:
    """Prepare engine and transport for the first version."""
    with visible(gpu):
        await engine.start()
    transport = None
    try:
        transport = trainer.transport(name, root, "bfloat16")
        engines = LoopEngines([engine], asyncio.get_running_loop())
        await asyncio.to_thread(transport.connect, engines, "127.0.0.1:29711")
        yield transport
    finally:
        if transport is not None:
            transport.close()
        await engine.close()


async def measure(
    name: str,
    trainer: Trainer,
    model_path: Path,
    root: Path,
    *,
    gpu: int | None,
    num_rounds: int,
    engine_options: dict[str, Any] = ENGINE,
) -> list[dict[str, Any]]:
    """Measure all rounds of one transport. The first is left out: it allocates. `engine_options`: of the rollout."""
    on_gpu = trainer.device.type == "cuda"
    config = RolloutConfig(dtype="bfloat16", num_gpus_per_worker=1 if on_gpu else 0, **engine_options)
    engine = VllmEngine(EngineSpec(config, str(model_path), transport=name))
    rounds = []
    async with connected(name, trainer, engine, root, gpu) as transport:
        for version in range(1, num_rounds + 2):
            trainer.change()
            if on_gpu:
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
            held = torch.cuda.memory_allocated() if on_gpu else 0
            start = time.perf_counter()
            delivery = await asyncio.to_thread(transport.prepare, version)
            prepared = time.perf_counter()
            await asyncio.gather(asyncio.to_thread(transport.send, version), engine.load(delivery))
            done = time.perf_counter()
            extra = torch.cuda.max_memory_allocated() - held if on_gpu else 0
            reclaim(root)
            sampling = Sampling(max_tokens=RESPONSE_TOKENS, ignore_eos=True, seed=version)
            (completion,) = await engine.generate(PROMPT, 1, sampling)
            assert set(completion.versions) == {version}
            rounds.append(
                {
                    "transport": name,
                    "version": version,
                    "prepare_s": prepared - start,
                    "load_s": done - prepared,
                    "total_s": done - start,
                    "extra_gpu_bytes": extra,
                    "logprob_difference": trainer.mean_difference(completion.token_ids, completion.logprobs),
                }
            )
    return rounds[1:]


def print_rounds(rounds: list[dict[str, Any]], num_bytes: int) -> None:
    table = new_table(
        f"Weights of {num_bytes / 1e9:.2f} GB (bfloat16) to one engine, medians",
        ["transport"],
        ["prepare", "engines paused", "in all", "GB/s", "extra GPU memory", "logprob difference"],
    )
    for name in dict.fromkeys(entry["transport"] for entry in rounds):
        some = [entry for entry in rounds if entry["transport"] == name]
        middle = {key: statistics.median(entry[key] for entry in some) for key in some[0] if key != "transport"}
        table.add_row(
            name,
            f"{middle['prepare_s']:.3f} s",
            f"{middle['load_s']:.3f} s",
            f"{middle['total_s']:.3f} s",
            f"{num_bytes / 1e9 / middle['total_s']:.1f}",
            f"{middle['extra_gpu_bytes'] / 2**20:.0f} MiB",
            f"{middle['logprob_difference']:.4f}",
        )
    show(table)


def main() -> None:
    arguments = parse_arguments(__doc__)
    num_gpus = count_gpus("weights")
    num_rounds = 2 if arguments.quick else arguments.rounds or NUM_ROUNDS
    device = torch.device("cuda", 0)
    places: dict[str, int | None] = {"shm": 0, "ipc": 0} | ({"nccl": 1} if num_gpus > 1 else {})
    rounds: list[dict[str, Any]] = []
    with memory_folder() as root, tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
        model_path = Path(folder)
        num_bytes = 2 * write_model(model_path, "small" if arguments.quick else "0.5b", device)
        for name, gpu in places.items():
            trainer = Trainer(model_path, device)
            rounds += asyncio.run(measure(name, trainer, model_path, root / name, gpu=gpu, num_rounds=num_rounds))
            print(rounds[-1], flush=True)
            del trainer
            torch.cuda.empty_cache()
    print_rounds(rounds, num_bytes)
    write_json(arguments.json, "gpu_weights", rounds, [], gpus=gpu_names())


if __name__ == "__main__":
    main()

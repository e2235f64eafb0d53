"""Both sides of a transport on a machine without a GPU."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from penstock.conf.rollout import RolloutConfig
from penstock.workers.protocols import EngineSpec
from penstock.workers.rollout.engine_vllm import VllmEngine
from penstock.workers.weights.engine_calls import StreamPart
from penstock.workers.weights.weight_senders import StreamTransport
from tests.publications import SharedMemoryTransport
from tests.workers.weights.streaming.host_memory import (
    BUCKET_MIB,
    HostTorch,
    LoadingLLM,
    Model,
    ShmWorker,
    Side,
    Stream,
    Wire,
    lone_rank,
    weights,
)


@pytest.fixture
def host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's transfer modules take the host's memory for a GPU's."""
    import vllm.model_executor.model_loader.mtp_validation  # noqa: F401 - seconds, which the first load would wait for
    from vllm.distributed.weight_transfer import base, ipc_engine, nccl_engine, packed_tensor

    handles: list[torch.Tensor] = []

    def export(tensor: torch.Tensor) -> tuple[None, tuple[int, ...]]:
        handles.append(tensor)
        return None, (0, 0, 0, 0, 0, 0, 7, len(handles) - 1)

    for module in (base, ipc_engine, nccl_engine, packed_tensor):
        monkeypatch.setattr(module, "torch", HostTorch())
    monkeypatch.setattr(packed_tensor, "_get_streams", lambda _, count: (Stream(),) * count)
    monkeypatch.setattr(packed_tensor, "reduce_tensor", export)
    monkeypatch.setattr(torch.multiprocessing.reductions, "rebuild_cuda_tensor", lambda *args: handles[args[7]])


@pytest.fixture
def make_side(host_memory: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Side]:
    """`(transport, engines=1, timeout_s=30, in_flight=0, num_gpus_per_worker=0, **troubles)`."""
    from vllm.distributed.weight_transfer import nccl_engine

    def make(
        name: str,
        *,
        engines: int = 1,
        timeout_s: float = 30.0,
        in_flight: int = 0,
        num_gpus_per_worker: float = 0,
        **troubles: Callable[[], Any],
    ) -> Side:
        tensors, wire, part_bytes = weights(), Wire(engines), []
        monkeypatch.setattr(nccl_engine, "open_trainer_endpoint", wire.sender)
        monkeypatch.setattr(nccl_engine, "worker_init_process_group", wire.receiver)
        transport: StreamTransport | SharedMemoryTransport = SharedMemoryTransport(tmp_path, tensors.items, "bfloat16")
        if name != "shm":
            transport = StreamTransport(name, lone_rank(tensors), bucket_mib=BUCKET_MIB, timeout_s=timeout_s)
        models = [Model() for _ in range(engines)]
        made = []
        for model in models:
            config = RolloutConfig(num_gpus_per_worker=num_gpus_per_worker)
            engine = VllmEngine(EngineSpec(config, "a-model", transport=name, phase_timeout_s=timeout_s))
            engine.llm, engine.num_in_flight = LoadingLLM(worker(name, model), troubles), in_flight
            monkeypatch.setattr(engine, "deliver", noting(part_bytes, engine.deliver))
            made.append(engine)
        return Side(name, tensors, transport, made, models, wire, part_bytes)

    return make


def worker(name: str, model: Model) -> Any:
    """The worker that loads into the model: vLLM's where the transport is."""
    from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

    from penstock.workers.weights.vllm.backends import PickledIpcEngine

    if name == "shm":
        return ShmWorker(model)
    parallel = SimpleNamespace(data_parallel_index=0, world_size=1, rank=0)
    config = SimpleNamespace(parallel_config=parallel, model_config=None)
    kind = {"ipc": PickledIpcEngine, "nccl": NCCLWeightTransferEngine}[name]
    return kind(SimpleNamespace(backend=name), config, torch.device("cpu"), model)


def noting(sizes: list[int], deliver: Callable[[StreamPart], Any]) -> Callable[[StreamPart], Any]:
    async def note(part: StreamPart) -> None:
        sizes.append(sum((part.info or {}).get("tensor_sizes") or [0]))
        await deliver(part)

    return note

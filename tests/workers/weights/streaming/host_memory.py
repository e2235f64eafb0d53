"""Stand-ins for what vLLM's senders and receivers of `ipc` and `nccl` want of a GPU: they run on host memory, over an
exchange of handles in place of CUDA's and a broadcast in place of NCCL's.
"""

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

from penstock.workers.protocols import Publication
from penstock.workers.rollout.engine_vllm import VllmEngine
from penstock.workers.weights.engine_calls import LoopEngines
from penstock.workers.weights.piece import Piece
from penstock.workers.weights.publication.publication_files import MappedWeights
from penstock.workers.weights.weight_senders import SendingRank
from tests.workers.rollout.fake_llm import Action, FakeLLM

BUCKET_MIB = 1
BUCKET = BUCKET_MIB * 2**20
TRANSPORTS = ["shm", "ipc", "nccl"]
STREAMS = ["ipc", "nccl"]


@dataclass
class Stream:
    """A CUDA stream: nothing to wait for."""

    def synchronize(self) -> None:
        pass


class HostTorch:
    """`torch` as vLLM's transfer modules see it here: GPU memory is the host's, streams do nothing."""

    accelerator = SimpleNamespace(current_device_index=lambda: 0, synchronize=lambda: None)
    cuda = SimpleNamespace(
        current_stream=Stream,
        stream=lambda _: contextlib.nullcontext(),
        is_available=lambda: False,
        ipc_collect=lambda: None,
        get_device_properties=lambda _: SimpleNamespace(uuid="GPU-0"),
    )

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def empty(*size: Any, device: Any = None, **options: Any) -> torch.Tensor:
        return torch.empty(*size, **options)


@dataclass
class Wire:
    """NCCL's group of one sender and several receivers: everybody must come, and a broadcast waits for its partner."""

    num_receivers: int
    boxes: list["queue.Queue[torch.Tensor]"] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    """Bytes of each broadcast."""

    def __post_init__(self) -> None:
        self.met = threading.Barrier(self.num_receivers + 1)

    def sender(self, _: Any) -> Any:
        self.met.wait(3)

        def broadcast(tensor: torch.Tensor, src: int) -> None:
            self.sizes.append(tensor.nbytes)
            for box in self.boxes:
                box.put(tensor.clone())

        return SimpleNamespace(broadcast=broadcast, destroy=lambda: None)

    def receiver(self, info: Any, parallel: Any) -> Any:
        box: queue.Queue[torch.Tensor] = queue.Queue()
        self.boxes.append(box)
        self.ranks.append(info.rank_offset + parallel.rank)
        self.met.wait(3)
        return SimpleNamespace(broadcast=lambda tensor, src: tensor.copy_(box.get(timeout=3)), destroy=lambda: None)


class Model(torch.nn.Module):
    """Writes down what it is given to load."""

    def __init__(self) -> None:
        super().__init__()
        self.loads: list[list[tuple[str, torch.Tensor]]] = []

    def load_weights(self, weights: Any) -> set[str]:
        self.loads.append([(name, tensor.clone()) for name, tensor in weights])
        return {name for name, _ in self.loads[-1]}


class ShmWorker:
    """`vllm/backends.ShmTransferEngine` without vLLM's layerwise reload, which wants a model of vLLM's."""

    def __init__(self, model: Model) -> None:
        self.model = model

    @staticmethod
    def parse_init_info(info: dict[str, Any]) -> dict[str, Any]:
        return info

    def init_transfer_engine(self, info: dict[str, Any]) -> None:
        """Word of the publication that comes next."""

    def update_weights(self, info: dict[str, Any]) -> None:
        mapped = MappedWeights(Publication(info["directory"], info["version"]))
        assert mapped.inode == info["verified_inode"]
        self.model.load_weights(mapped.tensors())


class LoadingLLM(FakeLLM):
    """Has one worker load what comes."""

    def __init__(self, worker: Any, troubles: dict[str, Action]) -> None:
        super().__init__(**troubles)
        self.worker = worker

    async def init_weight_transfer_engine(self, request: Any) -> None:
        await self._do("connect")
        await asyncio.to_thread(self.worker.init_transfer_engine, self.worker.parse_init_info(request.init_info))

    async def update_weights(self, request: Any) -> None:
        await self._do("load")
        await asyncio.to_thread(self.worker.update_weights, request.update_info)

    async def sleep(self, level: int, mode: str) -> None:
        assert (level, mode) == (1, "keep")
        await self._do("sleep")

    async def wake_up(self, tags: list[str] | None = None) -> None:
        await self._do(f"wake {'+'.join(tags or ['all'])}")


@dataclass
class Side:
    """Both sides of one transport."""

    name: str
    tensors: dict[str, torch.Tensor]
    transport: Any
    engines: list[VllmEngine]
    models: list[Model]
    wire: Wire
    part_bytes: list[int]
    """Bytes of each part that went to the engines, as they announce it."""

    def run(self, version: int = 1, *, loading: bool = True, sending: bool = True) -> list[Any]:
        """`prepare`, then `send` beside every engine's `load`: what each gave or raised, the sender's first."""

        async def both() -> list[Any]:
            engines = LoopEngines(self.engines, asyncio.get_running_loop())
            await asyncio.to_thread(self.transport.connect, engines, "127.0.0.1:0")
            return await self.exchange(version, loading, sending)

        return asyncio.run(both())

    async def exchange(self, version: int, loading: bool, sending: bool) -> list[Any]:
        delivery = await asyncio.to_thread(self.transport.prepare, version)
        calls = [asyncio.to_thread(self.transport.send, version)] if sending else []
        calls += [engine.load(delivery) for engine in self.engines] if loading else []
        return await asyncio.gather(*calls, return_exceptions=True)

    def loaded(self, index: int = 0) -> list[tuple[str, torch.Tensor]]:
        return [pair for load in self.models[index].loads for pair in load]

    def calls(self, index: int = 0) -> list[str]:
        """Calls in order, a run of the same one once."""
        calls = [call for call in self.engines[index].llm.calls if call != "connect"]
        return [call for number, call in enumerate(calls) if number == 0 or calls[number - 1] != call]


def weights() -> dict[str, torch.Tensor]:
    """Five and a half megabytes in bfloat16: more than four buckets, none of the tensors larger than one."""
    generator = torch.Generator().manual_seed(0)
    shapes = {f"model.layers.{i}.{name}": shape for i in range(3) for name, shape in {
        "q_proj.weight": (512, 512), "q_proj.bias": (512,), "mlp.weight": (700, 512)}.items()}  # fmt: skip
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    return {"model.embed.weight": torch.randn(900, 512, generator=generator)} | tensors | {"scale": torch.tensor(0.1)}


def pieces_of(tensors: dict[str, torch.Tensor]) -> Callable[[], Iterator[Piece]]:
    """Pieces of the only rank."""
    return lambda: (Piece(name, tuple(tensor.shape), 0, tensor.reshape(-1)) for name, tensor in tensors.items())


def lone_rank(tensors: dict[str, torch.Tensor]) -> SendingRank:
    return SendingRank(
        0, 1, torch.device("cpu"), pieces_of(tensors), lambda value: [value], torch.nn.Module(), "bfloat16"
    )

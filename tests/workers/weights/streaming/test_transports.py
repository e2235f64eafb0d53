"""What every transport promises, on machines without a GPU: vLLM's own senders and receivers of `ipc` and `nccl` run
here on host memory, over stand-ins for CUDA and for NCCL's broadcast; `shm` runs as it is.
"""

import asyncio
import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from penstock.conf.errors import ConfigError, DeadlineExceeded, PenstockError, ResourceError, WeightError, WorkerDied
from penstock.conf.rollout import RolloutConfig
from penstock.workers.protocols import Publication
from penstock.workers.rollout.engine_vllm import VllmEngine
from penstock.workers.weights.publication.publication import write_publication
from penstock.workers.weights.publication.reading import MappedWeights, open_publication
from penstock.workers.weights.streaming.engine_calls import LoopEngines
from penstock.workers.weights.streaming.senders import StreamTransport, _portable
from penstock.workers.weights.trainer_side import TrainerSide, make_transport
from penstock.workers.weights.transport import Part, StreamedVersion

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.usefixtures("warm_spawn")]
pytest.importorskip("vllm", reason="vLLM is not installed: its transfer engines are not tested")

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
    """`vllm/shm.ShmTransferEngine` without vLLM's layerwise reload, which wants a model of vLLM's."""

    def __init__(self, model: Model) -> None:
        self.model = model

    @staticmethod
    def parse_init_info(info: dict[str, Any]) -> dict[str, Any]:
        return info

    def init_transfer_engine(self, info: dict[str, Any]) -> None:
        """Word of the publication that comes next."""

    def update_weights(self, info: dict[str, Any]) -> None:
        mapped = MappedWeights(open_publication(Publication(info["directory"], info["version"])))
        assert mapped.inode == info["verified_inode"]
        self.model.load_weights(mapped.tensors())


class FakeLLM:
    """Plays `AsyncLLM` over one worker and writes down what it was told. `troubles`: by call, what goes wrong."""

    def __init__(self, worker: Any, troubles: dict[str, Callable[[], Any]]) -> None:
        self.calls: list[str] = []
        self.errored = False
        self.version = "0"
        self._worker, self._troubles = worker, troubles

    async def _do(self, name: str) -> None:
        self.calls.append(name)
        if name in self._troubles:
            result = self._troubles[name]()
            if asyncio.iscoroutine(result):
                await result

    async def init_weight_transfer_engine(self, request: Any) -> None:
        await self._do("connect")
        worker = self._worker
        await asyncio.to_thread(worker.init_transfer_engine, worker.parse_init_info(request.init_info))

    async def pause_generation(self, *, mode: str, clear_cache: bool) -> None:
        await self._do("pause")

    async def reset_prefix_cache(self) -> None:
        await self._do("reset")

    async def sleep(self, level: int) -> None:
        await self._do("sleep")

    async def wake_up(self, tags: list[str] | None = None) -> None:
        await self._do(f"wake {'+'.join(tags or ['all'])}")

    async def start_weight_update(self) -> None:
        await self._do("start")

    async def update_weights(self, request: Any) -> None:
        await self._do("load")
        await asyncio.to_thread(self._worker.update_weights, request.update_info)

    async def finish_weight_update(self, weight_version: str) -> None:
        self.version = weight_version
        await self._do("finish")

    async def get_weight_version(self) -> str:
        await self._do("version")
        return self.version

    async def resume_generation(self) -> None:
        await self._do("resume")


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
    """Of each part that went to the engines, as they announce it."""

    def run(self, version: int = 1, *, loading: bool = True, sending: bool = True) -> list[Any]:
        """`prepare`, then `send` beside every engine's `load`: what each gave or raised, the sender's first."""

        async def both() -> list[Any]:
            engines = LoopEngines(self.engines, asyncio.get_running_loop())
            await asyncio.to_thread(self.transport.connect, engines, "127.0.0.1:0")
            return await self._exchange(version, loading, sending)

        return asyncio.run(both())

    async def _exchange(self, version: int, loading: bool, sending: bool) -> list[Any]:
        delivery = await asyncio.to_thread(self.transport.prepare, version)
        calls = [asyncio.to_thread(self.transport.send, version)] if sending else []
        calls += [engine.load(delivery) for engine in self.engines] if loading else []
        return await asyncio.gather(*calls, return_exceptions=True)

    def loaded(self, index: int = 0) -> list[tuple[str, torch.Tensor]]:
        return [pair for load in self.models[index].loads for pair in load]

    def calls(self, index: int = 0) -> list[str]:
        """In order, a run of the same call once."""
        calls = [call for call in self.engines[index]._llm.calls if call != "connect"]
        return [call for number, call in enumerate(calls) if number == 0 or calls[number - 1] != call]


def weights() -> dict[str, torch.Tensor]:
    """Five and a half megabytes in bfloat16: more than four buckets, none of the tensors larger than one."""
    generator = torch.Generator().manual_seed(0)
    shapes = {f"model.layers.{i}.{name}": shape for i in range(3) for name, shape in {
        "q_proj.weight": (512, 512), "q_proj.bias": (512,), "mlp.weight": (700, 512)}.items()}  # fmt: skip
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    return {"model.embed.weight": torch.randn(900, 512, generator=generator)} | tensors | {"scale": torch.tensor(0.1)}


def pieces_of(tensors: dict[str, torch.Tensor]) -> Callable[[], Iterator[Any]]:
    """Of the only rank."""
    return lambda: (
        SimpleNamespace(name=name, shape=tuple(tensor.shape), first=0, values=tensor.reshape(-1))
        for name, tensor in tensors.items()
    )


@pytest.fixture
def make_side(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Side]:
    """`(transport, engines=1, timeout_s=30, in_flight=0, **troubles)`."""
    import vllm.model_executor.model_loader.mtp_validation  # noqa: F401 - seconds, which the first load would wait for
    from vllm.distributed.weight_transfer import base, ipc_engine, nccl_engine, packed_tensor

    from penstock.workers.weights.vllm.ipc import PickledIpcEngine

    handles: list[torch.Tensor] = []

    def export(tensor: torch.Tensor) -> tuple[None, tuple[int, ...]]:
        handles.append(tensor)
        return None, (0, 0, 0, 0, 0, 0, 7, len(handles) - 1)

    for module in (base, ipc_engine, nccl_engine, packed_tensor):
        monkeypatch.setattr(module, "torch", HostTorch())
    monkeypatch.setattr(packed_tensor, "_get_streams", lambda _, count: (Stream(),) * count)
    monkeypatch.setattr(packed_tensor, "reduce_tensor", export)
    monkeypatch.setattr(torch.multiprocessing.reductions, "rebuild_cuda_tensor", lambda *args: handles[args[7]])

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
        side = TrainerSide(
            0,
            1,
            torch.device("cpu"),
            publish=lambda root, version: write_publication(root, version, tensors.items(), "bfloat16"),
            pieces=pieces_of(tensors),
            gather=lambda value: [value],
            module=torch.nn.Module(),
            dtype="bfloat16",
        )
        transport = make_transport(name, side, directory=str(tmp_path), bucket_mib=BUCKET_MIB, timeout_s=timeout_s)
        models = [Model() for _ in range(engines)]
        made = []
        for model in models:
            config = RolloutConfig(num_gpus_per_worker=num_gpus_per_worker)
            engine = VllmEngine(config, "a-model", num_threads=1, transport=name, phase_timeout_s=timeout_s)
            engine._llm, engine._in_flight = FakeLLM(worker(name, model), troubles), in_flight
            monkeypatch.setattr(engine, "deliver", noting(part_bytes, engine.deliver))
            made.append(engine)
        return Side(name, tensors, transport, made, models, wire, part_bytes)

    def worker(name: str, model: Model) -> Any:
        if name == "shm":
            return ShmWorker(model)
        kind = {"ipc": PickledIpcEngine, "nccl": nccl_engine.NCCLWeightTransferEngine}[name]
        parallel = SimpleNamespace(data_parallel_index=0, world_size=1, rank=0)
        config = SimpleNamespace(parallel_config=parallel, model_config=None)
        return kind(SimpleNamespace(backend=name), config, torch.device("cpu"), model)

    return make


def noting(sizes: list[int], deliver: Callable[[Part], Any]) -> Callable[[Part], Any]:
    async def note(part: Part) -> None:
        sizes.append(sum((part.info or {}).get("tensor_sizes") or [0]))
        await deliver(part)

    return note


def hang() -> Any:
    return asyncio.sleep(60)


def fail() -> Any:
    raise Exception("the worker says: cannot")


def is_serving(engine: VllmEngine) -> bool:
    try:
        engine._check_alive()
    except WorkerDied:
        return False
    return True


@pytest.mark.parametrize("name", TRANSPORTS)
def test_every_tensor_arrives_once_cast_to_the_engines_dtype(make_side: Callable[..., Side], name: str) -> None:
    side = make_side(name)
    assert side.run() == [None, None]
    loaded = side.loaded()
    assert sorted(name for name, _ in loaded) == sorted(side.tensors)
    for tensor_name, tensor in loaded:
        expected = side.tensors[tensor_name].to(torch.bfloat16)
        assert (tensor.dtype, tensor.shape) == (torch.bfloat16, expected.shape)
        assert torch.equal(tensor, expected), tensor_name


@pytest.mark.parametrize("name", TRANSPORTS)
def test_phases_come_in_the_same_order_whatever_the_transport(make_side: Callable[..., Side], name: str) -> None:
    side = make_side(name, in_flight=2)
    assert side.run() == [None, None]
    assert side.calls() == ["pause", "start", "load", "finish", "version", "resume"]
    side = make_side(name)
    assert side.run() == [None, None]
    assert side.calls() == ["reset", "start", "load", "finish", "version"]


@pytest.mark.parametrize("name", TRANSPORTS)
def test_a_later_version_brings_what_the_trainer_has_by_then(make_side: Callable[..., Side], name: str) -> None:
    side = make_side(name)

    async def twice() -> None:
        await asyncio.to_thread(side.transport.connect, LoopEngines(side.engines, asyncio.get_running_loop()), "h:0")
        for version in (1, 2):
            assert await side._exchange(version, True, True) == [None, None]
            assert side.engines[0]._llm.version == str(version)
            for tensor in side.tensors.values():
                tensor.add_(1.0)

    asyncio.run(twice())
    first, second = side.loaded()[: len(side.tensors)], side.loaded()[len(side.tensors) :]
    for (tensor_name, before), (_, after) in zip(first, second, strict=True):
        expected = side.tensors[tensor_name] - 1.0
        torch.testing.assert_close(after.float(), expected, atol=0.05, rtol=0.01)
        assert not torch.equal(before, after)


@pytest.mark.parametrize("name", TRANSPORTS)
def test_every_engine_gets_the_same(make_side: Callable[..., Side], name: str) -> None:
    side = make_side(name, engines=3)
    assert side.run() == [None] * 4
    for index in (1, 2):
        for (ours, tensor), (theirs, other) in zip(side.loaded(0), side.loaded(index), strict=True):
            assert ours == theirs
            assert torch.equal(tensor, other)


def test_an_engine_that_sleeps_on_a_shared_gpu_wakes_its_weights_before_a_stream_and_its_cache_after_it(
    make_side: Callable[..., Side],
) -> None:
    side = make_side("ipc", num_gpus_per_worker=0.5)
    (engine,) = side.engines
    asyncio.run(engine.sleep())
    assert side.run() == [None, None]
    asyncio.run(engine.wake())
    assert side.calls() == [
        "sleep", "wake weights", "reset", "start", "load", "finish", "version", "wake kv_cache",
    ]  # fmt: skip
    asyncio.run(engine.sleep())
    asyncio.run(engine.wake())
    assert side.calls()[-2:] == ["sleep", "wake all"]
    assert [name for name, _ in side.loaded()] == list(side.tensors)


@pytest.mark.parametrize("trouble", ["fail", "hang"])
def test_weights_that_do_not_wake_end_the_sending(make_side: Callable[..., Side], trouble: str) -> None:
    troubles = {"wake weights": {"fail": fail, "hang": hang}[trouble]}
    side = make_side("ipc", num_gpus_per_worker=0.5, timeout_s=0.3, **troubles)
    asyncio.run(side.engines[0].sleep())
    sent, loaded = side.run()
    assert "phase wake" in str(loaded)
    assert "phase wake" in str(sent)


def test_engines_take_places_one_after_the_other_in_the_group_of_nccl(make_side: Callable[..., Side]) -> None:
    side = make_side("nccl", engines=3)
    side.run()
    assert sorted(side.wire.ranks) == [1, 2, 3]


def test_ipc_never_shares_more_than_a_bucket(make_side: Callable[..., Side]) -> None:
    side = make_side("ipc")
    side.run()
    parts = side.part_bytes[:-1]
    assert len(parts) > 4
    assert max(parts) <= BUCKET
    assert sum(parts) == sum(tensor.numel() * 2 for tensor in side.tensors.values())


def test_nccl_sends_a_bucket_and_at_most_the_tensor_that_fills_it(make_side: Callable[..., Side]) -> None:
    side = make_side("nccl")
    side.run()
    largest = max(tensor.numel() * 2 for tensor in side.tensors.values())
    assert len(side.wire.sizes) > 3
    assert max(side.wire.sizes) <= BUCKET + largest
    assert sum(side.wire.sizes) == sum(tensor.numel() * 2 for tensor in side.tensors.values())


@pytest.mark.parametrize("name", STREAMS)
def test_a_tensor_larger_than_the_bucket_makes_it_larger(make_side: Callable[..., Side], name: str) -> None:
    side = make_side(name)
    side.tensors["zz.large"] = torch.randn(2000, 512)
    side.transport = make_transport(
        name,
        TrainerSide(
            0, 1, torch.device("cpu"), lambda *_: Publication("", 0), pieces_of(side.tensors), lambda value: [value],
            torch.nn.Module(), "bfloat16",
        ),
        directory="", bucket_mib=BUCKET_MIB, timeout_s=30.0,
    )  # fmt: skip
    assert side.run() == [None, None]
    assert "zz.large" in dict(side.loaded())


@pytest.mark.parametrize("name", TRANSPORTS)
def test_an_engine_that_serves_another_version_than_asked_for_is_broken(
    make_side: Callable[..., Side], name: str
) -> None:
    side = make_side(name, finish=lambda: setattr(side.engines[0]._llm, "version", "default"))
    sent, loaded = side.run(3)
    assert isinstance(loaded, WeightError)
    assert "version 3: the engine says it serves 'default'" in str(loaded)
    assert not is_serving(side.engines[0])
    assert sent is None if name == "shm" else sent is loaded


@pytest.mark.parametrize("name", TRANSPORTS)
@pytest.mark.parametrize("phase", ["load", "finish", "version"])
@pytest.mark.parametrize(("trouble", "expected"), [(hang, DeadlineExceeded), (fail, WeightError)])
def test_an_engine_that_fails_or_never_answers_is_named_with_its_phase_on_both_sides(
    make_side: Callable[..., Side], name: str, phase: str, trouble: Callable[[], Any], expected: type[PenstockError]
) -> None:
    side = make_side(name, timeout_s=1.0, **{phase: trouble})
    started = time.perf_counter()
    sent, loaded = side.run()
    assert time.perf_counter() - started < 30
    assert isinstance(loaded, expected)
    assert f"version 1, phase {phase}" in str(loaded)
    assert not is_serving(side.engines[0])
    if name == "shm":
        assert sent is None
    else:
        assert sent is loaded
        with pytest.raises(WeightError, match=f"is not connected: .*phase {phase}"):
            side.transport.send(2)


@pytest.mark.parametrize("name", STREAMS)
def test_one_engine_of_two_that_fails_ends_the_sending(make_side: Callable[..., Side], name: str) -> None:
    side = make_side(name, engines=2, timeout_s=2.0)
    side.engines[1]._llm._troubles = {"load": fail}
    sent, _, loaded = side.run()
    assert isinstance(loaded, WeightError)
    assert sent is loaded


@pytest.mark.parametrize("name", STREAMS)
@pytest.mark.parametrize("phase", ["pause", "start"])
def test_a_failure_before_loading_ends_the_sending_and_leaves_the_old_weights_serving(
    make_side: Callable[..., Side], name: str, phase: str
) -> None:
    side = make_side(name, in_flight=1, timeout_s=2.0, **{phase: fail})
    sent, loaded = side.run()
    assert isinstance(loaded, WeightError)
    assert f"phase {phase}" in str(loaded)
    assert side.calls()[-1] == "resume"
    assert is_serving(side.engines[0])
    assert sent is loaded


@pytest.mark.parametrize("name", STREAMS)
def test_a_sender_that_dies_is_noticed_by_the_engine(make_side: Callable[..., Side], name: str) -> None:
    side = make_side(name, timeout_s=0.3)
    (loaded,) = side.run(sending=False)
    assert isinstance(loaded, DeadlineExceeded)
    assert "version 1, phase receive" in str(loaded)
    assert "after 0 of 11 tensors" in str(loaded)
    assert not is_serving(side.engines[0])


@pytest.mark.parametrize("name", STREAMS)
def test_an_engine_that_is_never_told_of_the_version_is_noticed_by_the_sender(
    make_side: Callable[..., Side], name: str
) -> None:
    side = make_side(name, timeout_s=0.3)
    (sent,) = side.run(loading=False)
    assert isinstance(sent, DeadlineExceeded)
    assert "version 1, phase send, trainer rank 0 of 1" in str(sent)
    assert "of 11 tensors taken" in str(sent)


@pytest.mark.parametrize("name", STREAMS)
def test_an_engine_that_does_not_connect_is_named(make_side: Callable[..., Side], name: str) -> None:
    with pytest.raises(PenstockError, match="connecting to the trainer"):
        make_side(name, timeout_s=0.3, connect=hang).run()


def test_a_worker_that_cannot_open_a_handle_is_an_error_of_both(make_side: Callable[..., Side]) -> None:
    side = make_side("ipc", timeout_s=2.0)
    side.engines[0]._llm._worker.init_transfer_engine = lambda _: None  # it then expects one handle for each tensor
    sent, loaded = side.run()
    assert isinstance(loaded, WeightError)
    assert "phase load" in str(loaded)
    assert sent is loaded


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ([Part(2, {"names": ["a"]})], "version 1, phase receive: the trainer sends version 2"),
        ([Part(1, {"names": ["a"]}), Part(1, None)], "announced 2 tensors and ended after 1"),
        ([Part(1, {"names": ["a", "b", "c"]}), Part(1, None)], "announced 2 tensors and ended after 3"),
    ],
)
def test_parts_of_another_version_and_wrong_counts_are_refused(
    make_side: Callable[..., Side], parts: list[Part], expected: str
) -> None:
    engine = make_side("ipc").engines[0]
    engine._llm._worker.update_weights = lambda info: None

    async def run() -> list[Any]:
        async def send() -> None:
            for part in parts:
                await engine.deliver(part)

        return await asyncio.gather(engine.load(StreamedVersion(1, 2)), send(), return_exceptions=True)

    loaded, sent = asyncio.run(run())
    assert isinstance(loaded, WeightError)
    assert expected in str(loaded)
    assert sent is loaded
    assert not is_serving(engine)


def stuck_transport(name: str, trainer: Any) -> StreamTransport:
    """A stream over a trainer engine of one's own in place of vLLM's."""
    side = TrainerSide(
        0, 1, torch.device("cpu"), lambda *_: Publication("", 0), pieces_of(weights()), lambda value: [value],
        torch.nn.Module(), "bfloat16",
    )  # fmt: skip
    made = make_transport(name, side, directory="", bucket_mib=BUCKET_MIB, timeout_s=0.2)
    assert isinstance(made, StreamTransport)
    return StreamTransport(name, lambda *_: None, made._stream, made._place, trainer_init=trainer)


class NoEngines:
    num_engines = workers_per_engine = 1

    def connect(self, infos: Any) -> None:
        pass

    def deliver(self, part: Part) -> None:
        pass


def test_a_collective_that_lost_its_partner_ends_with_the_tensor_where_it_stood() -> None:
    """The stand-in takes two tensors and then waits for somebody who never comes."""

    class Stuck:
        def __init__(self, source: Any) -> None:
            self._source = source

        def send_weights(self) -> None:
            stream = iter(self._source)
            for _ in range(3):
                next(stream)
            threading.Event().wait(30)

    transport = stuck_transport("nccl", lambda info, *, client, source: Stuck(source))
    transport.connect(NoEngines(), "h:0")
    with pytest.raises(DeadlineExceeded, match=r"phase send.*2 of 11 tensors taken, at 'model.layers.0.q_proj.bias'"):
        transport.send(1)
    with pytest.raises(WeightError, match=r"nccl is not connected"):
        transport.send(2)
    transport.close()


def test_slow_progress_is_no_reason_to_end() -> None:
    class Slow:
        def __init__(self, source: Any) -> None:
            self._source = source

        def send_weights(self) -> None:
            for _ in self._source:
                time.sleep(0.1)  # eleven tensors: five times the longest silence

        def shutdown(self) -> None:
            pass

    transport = stuck_transport("nccl", lambda info, *, client, source: Slow(source))
    transport.connect(NoEngines(), "h:0")
    transport.send(1)
    transport.close()
    with pytest.raises(WeightError, match="it was closed"):
        transport.send(2)


def test_what_a_transport_needs_and_does_not_find_is_named() -> None:
    def missing(info: Any, *, client: Any, source: Any) -> Any:
        raise ImportError("The nccl_m2n weight transfer backend requires the `nccl-extensions` package")

    with pytest.raises(ResourceError, match=r"weights.transport=nccl_m2n needs .* `nccl-extensions`"):
        stuck_transport_m2n(missing).connect(NoEngines(), "h:0")


def stuck_transport_m2n(trainer: Any) -> StreamTransport:
    ordinary = stuck_transport("nccl", trainer)
    return StreamTransport("nccl_m2n", lambda *_: None, ordinary._stream, ordinary._place, trainer_init=trainer)


def test_an_unknown_transport_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"weights.transport=rdma: unknown"):
        stuck_transport("rdma", None)


def test_handles_reach_the_process_of_a_real_engine(tmp_path: Path) -> None:
    """vLLM's receiver opens them there; on a machine without a GPU that is as far as it gets."""
    from penstock.conf.model import FreshModelConfig
    from penstock.workers.models.fresh import build_fresh_model

    build_fresh_model(tmp_path, FreshModelConfig(num_layers=1, hidden_size=64, intermediate_size=64, num_heads=2), 0)
    config = RolloutConfig(max_model_len=32, kv_cache_gib=0.1, max_concurrent_samples=16)
    handle = {"GPU-0": (torch.Tensor, (2,), torch.bfloat16, b"handle")}
    info = {
        "names": ["a"], "dtype_names": ["bfloat16"], "shapes": [[1]], "tensor_sizes": [2], "ipc_handles": handle
    }  # fmt: skip

    async def run() -> list[Any]:
        engine = VllmEngine(config, str(tmp_path), num_threads=1, transport="ipc")
        await engine.start()
        try:
            await engine.connect({"packed": True})
            part = Part(1, _portable(info))
            return await asyncio.gather(
                engine.load(StreamedVersion(1, 1)), engine.deliver(part), return_exceptions=True
            )
        finally:
            await engine.close()

    loaded, delivered = asyncio.run(run())
    assert isinstance(loaded, WeightError)
    assert "phase load" in str(loaded)
    assert "CUDA" in str(loaded) or "UUID" in str(loaded)  # no GPU here, or another one than the handle's
    assert delivered is loaded

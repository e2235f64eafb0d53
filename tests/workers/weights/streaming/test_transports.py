"""The promises of every transport, on machines without a GPU: vLLM's own senders and receivers of `ipc` and `nccl` run
here on host memory (`host_memory.py`), `shm` runs as it is.
"""

import asyncio
from collections.abc import Callable

import pytest
import torch

from penstock.workers.weights.engine_calls import LoopEngines
from penstock.workers.weights.weight_senders import StreamTransport
from tests.workers.weights.streaming.host_memory import BUCKET, BUCKET_MIB, STREAMS, TRANSPORTS, Side, lone_rank

pytestmark = [pytest.mark.real, pytest.mark.usefixtures("warm_spawn")]
pytest.importorskip("vllm", reason="vLLM is not installed: its transfer engines are not tested")


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
            assert await side.exchange(version, True, True) == [None, None]
            assert side.engines[0].llm.version == str(version)
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


@pytest.mark.parametrize("in_flight", [0, 2])
def test_a_sleeping_engine_wakes_its_weights_before_a_stream_and_cache_after_it(
    make_side: Callable[..., Side], in_flight: int
) -> None:
    """An engine on a GPU that it shares with others. What is in flight was paused when it fell asleep."""
    side = make_side("ipc", num_gpus_per_worker=0.5)
    (engine,) = side.engines
    engine.num_in_flight = in_flight
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
    side.transport = StreamTransport(name, lone_rank(side.tensors), bucket_mib=BUCKET_MIB, timeout_s=30.0)
    assert side.run() == [None, None]
    assert "zz.large" in dict(side.loaded())

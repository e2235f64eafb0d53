"""The sending end of a stream, over a trainer engine of one's own in place of vLLM's."""

import threading
import time
from typing import Any

import pytest

from penstock.conf.errors import ConfigError, DeadlineExceeded, ResourceError, WeightError
from penstock.workers.weights.engine_calls import StreamPart
from penstock.workers.weights.weight_senders import StreamTransport
from tests.workers.weights.streaming.host_memory import BUCKET_MIB, lone_rank, weights

pytestmark = [pytest.mark.real, pytest.mark.usefixtures("warm_spawn")]
pytest.importorskip("vllm", reason="vLLM is not installed: its transfer engines are not tested")


def stuck_transport(name: str, trainer: Any) -> StreamTransport:
    """A stream over a trainer engine of one's own in place of vLLM's."""
    rank = lone_rank(weights())
    return StreamTransport(name, rank, bucket_mib=BUCKET_MIB, timeout_s=0.2, trainer_init=trainer)


class NoEngines:
    num_engines = workers_per_engine = 1

    def connect(self, infos: Any) -> None:
        pass

    def deliver(self, part: StreamPart) -> None:
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
        stuck_transport("nccl_m2n", missing).connect(NoEngines(), "h:0")


def test_an_unknown_transport_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"weights.transport=rdma: unknown"):
        stuck_transport("rdma", None)

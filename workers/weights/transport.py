"""The transport of a new version of the weights from the trainer's ranks to the engines: one interface over every way.

    controller            trainer, on every rank              every engine
    once                  connect(engines, address) ────────▶ connect(init_info)
    each version          prepare(version) ─▶ delivery
                          send(version)                  ‖    load(delivery)
                            └─ part, part, …, end ──────────▶ deliver(part)

`shm` writes the whole version in `prepare`, while engines go on generating; its `send` does nothing. A run begins and
finishes the trainer's publication instead. The others stream from GPU to GPU: `prepare` costs nothing,
and `send` and the engines' `load` must run *at the same time*, since each waits for the other, and before the trainer's
next update changes the weights that are under way.

Here are the interface, the messages between the two sides, and `shm`; `streaming/senders.py` has the others,
`streaming/engine_calls.py` an engine's side of a stream. Which one a run takes: `conf/weights.py`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from penstock.workers.protocols import Publication
from penstock.workers.weights.vllm.plugin import BACKEND, IPC_BACKEND

Info = dict[str, Any]
"""Arguments of vLLM's weight-transfer backends, for the start or for a part of a version."""


@dataclass(frozen=True)
class StreamedVersion:
    """Announcement to an engine that a version is about to be sent to it, part by part."""

    version: int
    num_tensors: int
    """Tensors that must have arrived when the end is announced."""


Delivery = Publication | StreamedVersion
"""The argument of an engine's `load`: where a version is, or that it is streamed."""


@dataclass(frozen=True)
class Part:
    """Some tensors of a version, or the notice that all have been sent."""

    version: int
    info: Info | None
    """vLLM's `update_info`: names, dtypes, shapes, and how to get at the values. None: the end."""


class Engines(Protocol):
    """All engines of the run as the sending rank reaches them. Calls go to all of them and return once all have
    answered; the first failure is raised as that engine's own error."""

    num_engines: int
    workers_per_engine: int
    """GPUs of each engine."""

    def connect(self, infos: Sequence[Info]) -> None:
        """Connect the engines; vLLM's `init_info`, one for each. Returns when they are ready to receive."""

    def deliver(self, part: Part) -> None:
        """Deliver a part. Returns when every engine has loaded it; for the end, when every engine serves the
        version."""


class Transport(Protocol):
    """The trainer's side. Every rank has one and makes the same calls; all but `close` are collective."""

    def connect(self, engines: Engines, address: str) -> None:
        """Connect to the engines, once, before the first version. `address`: host:port on rank 0's node, where they can
        meet."""

    def prepare(self, version: int) -> Delivery:
        """Do all that can be done before the engines are told; return what to tell them."""

    def send(self, version: int) -> None:
        """Send the version. Returns when the weights may change again. Raises `WeightError`, `DeadlineExceeded`, or
        what an engine raised."""

    def close(self) -> None:
        """Close connections. Not collective; safe after a failure."""


class ShmTransport:
    """Publications in the node's shared memory: nothing to agree on, nothing to send once they are sealed."""

    def __init__(self, publish: Callable[[str, int], Publication], directory: str) -> None:
        """`publish`: the trainer's, collective. `directory`: root of the run's publications."""
        self._publish = publish
        self._directory = directory

    def connect(self, engines: Engines, address: str) -> None:
        pass

    def prepare(self, version: int) -> Delivery:
        return self._publish(self._directory, version)

    def send(self, version: int) -> None:
        pass

    def close(self) -> None:
        pass


def vllm_backend(transport: str) -> str:
    """The name under which vLLM knows the receiving side."""
    return {"shm": BACKEND, "ipc": IPC_BACKEND}.get(transport, transport)

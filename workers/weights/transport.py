"""How a new version of the weights gets from the trainer's ranks to the engines: one interface over every way.

    controller            trainer, on every rank              every engine
    once                  connect(engines, address) ────────▶ connect(init_info)
    each version          prepare(version) ─▶ delivery
                          send(version)                  ‖    load(delivery)
                            └─ part, part, …, end ──────────▶ deliver(part)

`shm` writes the whole version in `prepare`, while engines go on generating; its `send` does nothing. A run calls the
trainer's `publish` in its place, which is all of it. The others stream from GPU to GPU: `prepare` costs nothing, and
`send` and the engines' `load` must run *at the same time*, since each waits for the other, and before the trainer's
next update changes the weights that are under way.

Here are the interface, the words that cross between the two sides, and `shm`; `streaming/senders.py` has the others,
`streaming/received_parts.py` an engine's side of a stream. Which one a run takes: `conf/transports.py`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from penstock.workers.protocols import Publication
from penstock.workers.weights.vllm.plugin import BACKEND, IPC_BACKEND

Info = dict[str, Any]
"""What one of vLLM's weight-transfer backends is told, to begin with or of a part of a version."""


@dataclass(frozen=True)
class StreamedVersion:
    """Tells an engine that a version is about to be sent to it, part by part."""

    version: int
    num_tensors: int
    """That must have arrived when the end is announced."""


Delivery = Publication | StreamedVersion
"""How a version comes to an engine: what its `load` is called with."""


@dataclass(frozen=True)
class Part:
    """Some tensors of a version, or the word that all have been sent."""

    version: int
    info: Info | None
    """vLLM's `update_info`: names, dtypes, shapes, and how to get at the values. None: the end."""


class Engines(Protocol):
    """All engines of the run as the sending rank reaches them. Calls go to all of them and return once all have
    answered; the first failure is raised as that engine's own error."""

    num_engines: int
    workers_per_engine: int
    """GPUs of each."""

    def connect(self, infos: Sequence[Info]) -> None:
        """vLLM's `init_info`, one for each engine. Returns when they are ready to receive."""

    def deliver(self, part: Part) -> None:
        """Returns when every engine has loaded the part; of the end, when every engine serves the version."""


class Transport(Protocol):
    """The trainer's side. Every rank has one and makes the same calls; all but `close` are collective."""

    streams: bool
    """`send` and the engines' `load` must run at the same time."""

    def connect(self, engines: Engines, address: str) -> None:
        """Once, before the first version. `address`: host:port on rank 0's node, for whoever needs to meet."""

    def prepare(self, version: int) -> Delivery:
        """All that can be done before the engines are told; returns what to tell them."""

    def send(self, version: int) -> None:
        """The rest. Returns when the weights may change again. Raises `WeightError`, `DeadlineExceeded`, or what an
        engine raised."""

    def close(self) -> None:
        """Let go of connections. Not collective; safe after a failure."""


class ShmTransport:
    """Publications in the node's shared memory: nothing to agree on, nothing to send once they are sealed."""

    streams = False

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

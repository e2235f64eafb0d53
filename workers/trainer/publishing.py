"""The trainer's weights to publications in shared memory, for the engines. Every rank writes its own elements. Rank 0
seals, or, where engines are on other nodes, the nodes' relays do. Models for people: `exporting.py`.

    begin    host     values ─▶ file, cast and summed
             device   values ─▶ copy on the device, cast ┐
             the next update may change weights          │
    a thread                                             └▶ file ─▶ all ranks have written ─▶ sealed ─▶ finish

In host memory a copy would cost more than it saves: the file is the copy. Between `begin` and `finish` a rank may
compute, copy its state and save it: the thread has a stream and a process group of its own, so it takes part in none of
their collectives.
"""

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.conf.errors import DeadlineExceeded, NotStarted
from penstock.conf.trainer import TrainerConfig
from penstock.workers.protocols import Publication
from penstock.workers.trainer import exporting
from penstock.workers.trainer.engines.engine import TrainEngine
from penstock.workers.trainer.ranks import Ranks, phase
from penstock.workers.weights.chain.plan import ChunkPlan, choose_chunk_bytes, make_plan
from penstock.workers.weights.chain.reports import Reporter
from penstock.workers.weights.piece import Piece
from penstock.workers.weights.publication.device_copies import stream_beside
from penstock.workers.weights.publication.layout import NO_OUTLET, Layout, compute_layout
from penstock.workers.weights.publication.publication import PublicationWriter, needs_buffers, seal
from penstock.workers.weights.publication.reused_files import publication_directory


@dataclass(frozen=True)
class UnderWay:
    """A version that has begun."""

    version: int
    result: "Future[Publication]" = field(default_factory=Future)
    began: float = field(default_factory=time.monotonic)


class Publisher:
    """The publications of one rank. All ranks make the same calls; all but `finish` are collective. Lifecycle: `begin`
    and `finish` for each version."""

    def __init__(self, ranks: Ranks, pieces: Callable[[], Iterable[Piece]], dtype: str) -> None:
        """`pieces`: an engine's `pieces` or `adapter_pieces`, of the same names and shapes for every version. `dtype`:
        of the engines."""
        self._ranks, self._pieces, self._dtype = ranks, pieces, dtype
        self._plan: ChunkPlan | None = None
        """Plan of publications that go to other nodes."""
        self._last: UnderWay | None = None

    @cached_property
    def layout(self) -> Layout:
        """Layout of every publication: names and shapes as `save_pretrained` has them, tied weights once. Collective
        where it is first asked for."""
        return compute_layout((piece.name, piece.shape, piece.dtype_in(self._dtype)) for piece in self._pieces())

    @cached_property
    def _group(self) -> dist.ProcessGroup | None:
        """Process group of the threads. Collective where it is first asked for."""
        return self._ranks.group_beside()

    @property
    def seconds_under_way(self) -> float | None:
        """Seconds since the version began that is under way. None: none is. May be asked at any time."""
        last = self._last
        return None if last is None or last.result.done() else time.monotonic() - last.began

    def plan_chunks(self, node: str, num_receivers: int) -> ChunkPlan:
        """Publish to other nodes from now on; return what each rank will publish in every version, the same on all of
        them. `node`: this rank's, as its relay is called; `num_receivers`: nodes with engines. Raises `WeightError` if
        the pieces are not the whole layout."""
        layout = self.layout
        own = [(piece.name, piece.first, len(piece.values)) for piece in self._pieces() if len(piece.values)]
        nodes, pieces_of_ranks = zip(*self._ranks.gather_ranks((node, own)), strict=True)
        chunk_bytes = choose_chunk_bytes(layout.num_bytes, len(set(nodes)), num_receivers)
        self._plan = make_plan(layout, pieces_of_ranks, nodes, chunk_bytes)
        return self._plan

    def begin(self, directory: str, version: int) -> None:
        """Take version `version`, to be published under the root `directory`: weights may change when this returns. One
        that is under way is waited for. Raises `WeightError`, e.g. when shared memory is full, and
        `DeadlineExceeded`."""
        if self._last is not None:
            self._wait(self._last, self._ranks.timeout.total_seconds(), "trainer.collective_timeout_s")
        layout, group = self.layout if self._plan is None else self._plan.layout, self._group
        writing = _Writing(directory, version, layout, self._ranks, self._plan)
        try:
            for piece in self._pieces():
                writing.take(piece)
        except BaseException:
            writing.give_up()
            raise
        stream, num_threads = stream_beside(self._ranks.device), torch.get_num_threads()
        last = self._last = UnderWay(version)

        def finish() -> None:
            torch.set_num_threads(num_threads)  # torch keeps it for each thread
            try:
                with phase(f"publication of version {version}", self._ranks), stream:
                    last.result.set_result(self._finish(writing, group))
            except BaseException as error:  # noqa: BLE001 - it is for `finish` to raise
                last.result.set_exception(error)

        threading.Thread(target=finish, name="publication", daemon=True).start()

    def finish(self, version: int, timeout_s: float) -> Publication:
        """Wait until the version that was begun last is sealed, or where it goes to other nodes, until all ranks have
        written. May be called beside anything else, and again. Raises what publishing raised, `DeadlineExceeded`, and
        `NotStarted` for another version."""
        last = self._last
        if last is None or last.version != version:
            raise NotStarted(f"version {version} was not begun by rank {self._ranks.rank}: begin it first.")
        self._wait(last, timeout_s, "weights.phase_timeout_s")
        return last.result.result()

    def _wait(self, last: UnderWay, timeout_s: float, key: str) -> None:
        if wait([last.result], timeout_s).not_done:
            raise DeadlineExceeded(
                f"publication of version {last.version}: rank {self._ranks.rank} did not end it within {timeout_s:g} "
                f"s. Raise {key} if it was only slow."
            )

    def _finish(self, writing: "_Writing", group: dist.ProcessGroup | None) -> Publication:
        ranks, directory, version, layout = self._ranks, writing.directory, writing.version, writing.layout
        writing.finish()
        if writing.plan is None:
            ranks.barrier(group)
            if ranks.rank == 0:
                seal(directory, version, layout, ranks.num_ranks)
        ranks.barrier(group)
        return Publication(str(publication_directory(directory, version)), version, layout.num_bytes)


class _Writing:
    """The writing of one version by one rank: `take` each piece, then `finish`, from any thread.

    With a plan the nodes' relays have begun the version: each chunk goes on as soon as it is written."""

    def __init__(self, directory: str, version: int, layout: Layout, ranks: Ranks, plan: ChunkPlan | None) -> None:
        self.directory, self.version, self.layout, self.plan = directory, version, layout, plan
        self._ranks = ranks
        self._copies: list[tuple[str, int, Tensor]] = []
        """Copies on the device: name of the tensor, first element, and `[n]` in the layout's dtype. All are held until
        the last is written: memory that is let go belongs to the computing at once, whatever other streams read."""
        self._open = ExitStack()

    @cached_property
    def _reporter(self) -> Reporter | None:
        if self.plan is None:
            return None
        return self._open.enter_context(Reporter(self.directory, self.plan, self.version, self._ranks.rank))

    @cached_property
    def _writer(self) -> PublicationWriter:
        outlet = NO_OUTLET if self._reporter is None else self._reporter.outlet
        ranks = self._ranks
        return PublicationWriter(self.directory, self.version, self.layout, ranks.rank, ranks.num_ranks, outlet)

    def take(self, piece: Piece) -> None:
        """Write values that are in host memory, and copy those on a device. They may change then."""
        if not needs_buffers(piece.values):
            self._writer.write_elements(piece.name, piece.first, piece.values)
        elif len(piece.values):
            dtype = getattr(torch, self.layout.place(piece.name).dtype)
            self._copies.append((piece.name, piece.first, piece.values.detach().to(dtype, copy=True)))

    def finish(self) -> None:
        """Write what is left."""
        try:
            for name, first, values in self._copies:
                self._writer.write_elements(name, first, values)
            if self._reporter is None:
                self._writer.finish()
            else:
                self._writer.close()
                self._reporter.finish()
        finally:
            self.give_up()

    def give_up(self) -> None:
        """Write no more."""
        self._copies.clear()
        self._open.close()


class Publishes:
    """The publications and exports of a trainer, which inherits them."""

    config: TrainerConfig
    model_path: str
    engine_dtype: str
    trainable: bool
    ranks: Ranks
    engine: TrainEngine
    publisher: Publisher

    def _phase(self, name: str) -> AbstractContextManager[None]:
        return phase(name, self.ranks, lambda: self.engine.where)

    def publish(self, directory: str, version: int) -> Publication:
        """Publish a version, and wait until that is done. Collective."""
        self.begin_publishing(directory, version)
        return self.finish_publishing(version, self.ranks.timeout.total_seconds())

    def begin_publishing(self, directory: str, version: int) -> None:
        """Begin to write version `version` under the root `directory`, every rank its shard: the model, or with
        `trainer.lora.publish=adapter` the adapter alone. The weights may change when this returns. Collective."""
        with self._phase(f"publication of version {version}"):
            self.publisher.begin(directory, version)

    def finish_publishing(self, version: int, timeout_s: float) -> Publication:
        """Wait until it is written. On one node it is sealed then; relays between nodes seal it later. May be called
        beside the next update, and again."""
        return self.publisher.finish(version, timeout_s)

    @property
    def publication_bytes(self) -> int:
        """Bytes of one version. Collective where it is asked for before the first."""
        with self._phase("layout of publications"):
            return self.publisher.layout.num_bytes

    def plan_chunks(self, node: str, num_receivers: int) -> ChunkPlan:
        """Publish to other nodes from now on: this rank is on `node`, and so many nodes receive. Collective; returns
        the same plan on every rank."""
        with self._phase("planning of publications"):
            return self.publisher.plan_chunks(node, num_receivers)

    def _published(self) -> Iterator[Piece]:
        """Pieces that engines are sent. Collective."""
        alone = self.trainable and self.config.lora.publishes_adapter
        return self.engine.adapter_pieces() if alone else self.engine.pieces()

    def try_export(self) -> None:
        """See that what an export has besides the weights can be written. Raises `ModelError`."""
        if self.ranks.rank == 0:
            exporting.try_texts(self.engine.model.lm, self.model_path, self.engine_dtype)

    def export(self, directory: str) -> dict[str, int]:
        """Write a HF model directory (safetensors, configuration, tokenizer), in the engines' dtype; return the weight
        files that this rank has written, with their bytes. `directory`: one that all ranks see. Collective. Raises
        `WeightError`."""
        with self._phase("export"):
            return exporting.export(self.engine, directory, self.model_path, self.engine_dtype)

"""The trainer's weights for others: published in shared memory for the engines, and exported as a HF directory, which
`from_pretrained` loads.

Every rank writes its own elements of a publication. Rank 0 seals it, or, where engines are on other nodes, the relays.

    begin    host     values ─▶ file, cast and summed
             device   values ─▶ copy on the device, cast ┐
             the next update may change weights          │
    a thread                                             └▶ file ─▶ all ranks have written ─▶ sealed ─▶ finish

In host memory a copy would cost more than it saves: the file is the copy. Between `begin` and `finish` a rank may
compute, copy its state and save it: the thread has a stream and a process group of its own, so it takes part in none of
their collectives.

An export is one file of weights for each rank that has a part, beside the files of the model's directory:

    one rank      model.safetensors
    several       model-00001-of-00002.safetensors, …, one a rank, and by rank 0 model.safetensors.index.json

Tensors are divided among the ranks by bytes, and gathered one after the other on the rank that writes them. So no rank
ever holds more of the model than its own elements and one whole tensor, and each element is sent once at most. Ranks on
several machines write into a directory that all of them see, or each into one of its own, which the driver collects.
What an earlier export left there goes when all files have been written; the index comes last.
"""

import contextlib
import json
import math
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoProcessor, AutoTokenizer

from penstock.conf.errors import DeadlineExceeded, ModelError, NotStarted, WeightError
from penstock.store.data import durable
from penstock.workers.models.model_files import CONFIG, INDEX, SINGLE, copy_texts, remove_weights, shard_name
from penstock.workers.protocols import Publication
from penstock.workers.runtime.local_files import FreeSpace, part_of, write_whole
from penstock.workers.trainer.engines.lora import save_adapter
from penstock.workers.trainer.engines.train_engine import TrainEngine
from penstock.workers.trainer.models.vision import vision_tower
from penstock.workers.trainer.ranks import Ranks, phase
from penstock.workers.weights.chain.plan import ChunkPlan, choose_chunk_bytes, make_plan
from penstock.workers.weights.chain.relay import Reporter
from penstock.workers.weights.piece import Piece, Span, gather_spans
from penstock.workers.weights.publication.layout import DTYPE_BYTES, NO_OUTLET, Layout, compute_layout
from penstock.workers.weights.publication.publication import PublicationWriter, needs_buffers, seal, side_stream
from penstock.workers.weights.publication.publication_files import publication_directory

ADVICE = "Make room, or make the model of a checkpoint elsewhere: penstock export CHECKPOINT DIRECTORY."
ADAPTER_FOLDER = "adapter"
GENERATION_CONFIG = "generation_config.json"


@dataclass(frozen=True)
class FilePlan:
    """The rank that writes each tensor, the same on every rank."""

    tensors: dict[str, tuple[tuple[int, ...], str]]
    """Shape and dtype of each."""
    owners: dict[str, int]

    @cached_property
    def names(self) -> dict[int, str]:
        """The file of each rank that has one."""
        writers = sorted(set(self.owners.values()))
        if len(writers) == 1:
            return {writers[0]: SINGLE}
        return {rank: shard_name(number, len(writers)) for number, rank in enumerate(writers, 1)}

    def layout(self, rank: int) -> Layout:
        """Layout of the rank's file."""
        mine = [name for name, owner in self.owners.items() if owner == rank]
        return compute_layout((name, *self.tensors[name]) for name in mine)

    def index(self) -> str:
        """Text of the index, as `save_pretrained` writes it."""
        num_bytes = sum(math.prod(shape) * DTYPE_BYTES[dtype] for shape, dtype in self.tensors.values())
        files = {name: self.names[owner] for name, owner in sorted(self.owners.items())}
        return json.dumps({"metadata": {"total_size": num_bytes}, "weight_map": files}, indent=2) + "\n"


def plan_files(tensors: dict[str, tuple[tuple[int, ...], str]], num_ranks: int) -> FilePlan:
    """Assign each tensor, in order, to the rank that has the fewest bytes so far. `tensors`: shape and dtype of
    each."""
    loads, owners = [0] * num_ranks, {}
    for name, (shape, dtype) in tensors.items():
        owners[name] = loads.index(min(loads))
        loads[owners[name]] += math.prod(shape) * DTYPE_BYTES[dtype]
    return FilePlan(tensors, owners)


def export(engine: TrainEngine, directory: str, model_path: str, dtype: str) -> dict[str, int]:
    """Write the model; return the weight files, with their bytes, that this rank has written. `model_path`: where
    configuration, tokenizer and processor come from. Where LoRA was trained, its weights are merged, and the adapter
    alone lies in `adapter/`. Collective. Raises `WeightError` where a file cannot be written."""
    target, ranks = Path(directory), engine.ranks
    tensors = gather_spans(engine.pieces(), dtype, ranks.gather_ranks)
    plan = plan_files({each.name: (each.shape, each.dtype) for each in tensors}, ranks.num_ranks)
    with _write_errors(target, ranks.rank, plan):
        target.mkdir(parents=True, exist_ok=True)
        written = _write_own(engine, plan, [each.spans for each in tensors], target)
    ranks.barrier()
    with _write_errors(target, ranks.rank, plan):
        remove_weights(target)
    ranks.barrier()
    with _write_errors(target, ranks.rank, plan):
        for name in written:
            durable.rename(part_of(target / name), target / name)
    ranks.barrier()
    with _write_errors(target, ranks.rank, plan, "config, tokenizer, index or adapter"):
        if ranks.rank == 0:
            if len(plan.names) > 1:
                write_whole(target / INDEX, index := plan.index())
                written[INDEX] = len(index.encode())
            _write_texts(engine.model.lm, target, model_path, dtype)
        save_adapter(engine.model.lm, target / ADAPTER_FOLDER, ranks.rank == 0)
    ranks.barrier()
    return written


@contextlib.contextmanager
def _write_errors(target: Path, rank: int, plan: FilePlan, what: str | None = None) -> Iterator[None]:
    """Raise `WeightError` for what cannot be written in the block, by default the rank's weights. Nothing of it stays,
    since it may be what has filled the disk."""
    free = FreeSpace(plan.layout(rank).num_bytes)
    free.measure(target)
    try:
        yield
    except (OSError, ValueError, SafetensorError) as error:
        name = plan.names.get(rank)
        if name is not None:
            with contextlib.suppress(OSError):
                part_of(target / name).unlink()
        text = f"export to {target}: rank {rank} could not write {what or name or 'its part'}: {error}"
        raise WeightError(text + free.shortage_text(ADVICE)) from None


def _write_own(engine: TrainEngine, plan: FilePlan, spans: Sequence[Sequence[Span]], target: Path) -> dict[str, int]:
    """Write this rank's file, under a temporary name until all are there. Every rank takes part in every tensor."""
    ranks = engine.ranks
    name, layout = plan.names.get(ranks.rank), plan.layout(ranks.rank)
    with part_of(target / name).open("wb", buffering=0) if name else contextlib.nullcontext() as file:
        if file is not None:
            _write_at(file.fileno(), memoryview(layout.header), 0)
        for piece, own in zip(engine.pieces(), spans, strict=True):
            dtype = getattr(torch, plan.tensors[piece.name][1])
            whole = _gathered(piece, own, plan.owners[piece.name], dtype, ranks)
            if whole is not None and file is not None:
                data = whole.view(torch.uint8).numpy().data
                _write_at(file.fileno(), data, layout.place(piece.name).offset)
        if file is not None:
            durable.sync_opened(file.fileno())
    return {name: layout.num_bytes} if name else {}


def _gathered(piece: Piece, spans: Sequence[Span], owner: int, dtype: torch.dtype, ranks: Ranks) -> Tensor | None:
    """Gather the flattened tensor on its owner; None on the others. Collective over the ranks that have a part of
    it."""
    values = piece.values.detach().to(device="cpu", dtype=dtype).contiguous()
    if ranks.rank != owner:
        if len(values):
            dist.send(values, group=ranks.group, group_dst=owner)
        return None
    if len(values) == math.prod(piece.shape):
        return values
    whole = torch.empty(math.prod(piece.shape), dtype=dtype)
    whole[piece.first : piece.first + len(values)] = values
    for rank, (first, count) in enumerate(spans):
        if count and rank != owner:
            dist.recv(whole[first : first + count], group=ranks.group, group_src=rank)
    return whole


def _write_at(file: int, data: memoryview, offset: int) -> None:
    """Write all data: a system call writes at most 2 GiB."""
    while data:
        count = os.pwrite(file, data, offset)
        data, offset = data[count:], offset + count


def try_texts(lm: Any, model_path: str, dtype: str) -> None:
    """Write all files of an export but the weights, and throw them away, so that what cannot be written is an error
    before anything is trained. Raises `ModelError`."""
    with tempfile.TemporaryDirectory(prefix="penstock-export-") as folder:
        try:
            _write_texts(lm, Path(folder), model_path, dtype)
        except (OSError, ValueError) as error:
            raise ModelError(
                f"model.path={model_path}: what belongs to its weights could not be exported after the training: "
                f"{error}. Mend the file there, or choose another model.path."
            ) from error


def _write_texts(lm: Any, target: Path, model_path: str, dtype: str) -> None:
    """Write what a directory has besides its weights: a directory's files as they are; a hub id's tokenizer through
    transformers, or its processor. Configurations are written as they are, too: transformers would refuse what it
    has read before, such as a temperature without sampling."""
    source = Path(model_path)
    if not source.is_dir():
        (AutoProcessor if vision_tower(lm) else AutoTokenizer).from_pretrained(model_path).save_pretrained(target)
    elif source.resolve() != target.resolve():
        copy_texts(source, target)
    config = type(lm.config).from_dict(lm.config.to_dict() | {"dtype": dtype})
    config.to_json_file(target / CONFIG)
    if getattr(lm, "generation_config", None) is not None:
        lm.generation_config.to_json_file(target / GENERATION_CONFIG)


@dataclass(frozen=True)
class PendingPublication:
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
        self._last: PendingPublication | None = None

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
        writing = _VersionWriter(directory, version, layout, self._ranks, self._plan)
        try:
            for piece in self._pieces():
                writing.take(piece)
        except BaseException:
            writing.give_up()
            raise
        stream, num_threads = side_stream(self._ranks.device), torch.get_num_threads()
        last = self._last = PendingPublication(version)

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

    def _wait(self, last: PendingPublication, timeout_s: float, key: str) -> None:
        if wait([last.result], timeout_s).not_done:
            raise DeadlineExceeded(
                f"publication of version {last.version}: rank {self._ranks.rank} did not end it within {timeout_s:g} "
                f"s. Raise {key} if it was only slow."
            )

    def _finish(self, writing: "_VersionWriter", group: dist.ProcessGroup | None) -> Publication:
        ranks, directory, version, layout = self._ranks, writing.directory, writing.version, writing.layout
        writing.finish()
        if writing.plan is None:
            ranks.barrier(group)
            if ranks.rank == 0:
                seal(directory, version, layout, ranks.num_ranks)
        ranks.barrier(group)
        path = str(publication_directory(directory, version))
        return Publication(path, version, layout.num_bytes, writing.checksum)


class _VersionWriter:
    """The writing of one version by one rank: `take` each piece, then `finish`, from any thread.

    With a plan the nodes' relays have begun the version: each chunk is passed on as soon as it is written."""

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

    @property
    def checksum(self) -> int:
        """See `Publication.checksum`, once all is written."""
        return self._writer.checksum

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

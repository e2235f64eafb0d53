"""The store's side of large batches: which files there are, their readers, and when they may be written again.

    written ─ adopt ─▶ the store's ─ end, last use over ─▶ back to its writer, to be written again
                            └─ beyond the budget ─▶ moved to disk        └─ or removed

A producer writes the file (`segment_files.py`) and names it in its call; from then on the store decides when it goes,
so nothing is lost with a producer. What exceeds the budget of shared memory is moved to disk, where it is mapped all
the same: rows that came last are needed last. A client learns what ended with its next answer, or soon if there is
none. `segment_book.py` decides what becomes of a file; `Segments` does it. `Intake` takes any batch, small or large:
checked against the schema, it becomes a block.
"""

import asyncio
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import pyarrow as pa
from msgspec import Struct

from penstock.network.names import OutsideName, checked
from penstock.store.data.block_index import Payload, ValueBlock
from penstock.store.data.codec import SegmentRef, SentBatch, kind_of
from penstock.store.data.remote_rows import (
    NodeOrders,
    PreallocateOrder,
    RemoteReader,
    RemoveOrder,
    RowsNodes,
    RowsServer,
    SpillOrder,
    SweepOrder,
)
from penstock.store.data.roots import claim_root, remove_root, sweep_stale
from penstock.store.data.schema import check_types
from penstock.store.data.segment_book import Instructions, SegmentBook, writer_of
from penstock.store.data.segment_files import (
    Arena,
    DebouncedCall,
    FileThread,
    SegmentMappings,
    files_of_writers,
    move,
    preallocate,
)
from penstock.store.errors import RowsLost, StoreClosed, StoreError
from penstock.store.spec import StoreSpec

REMOVED_HERE = 16 << 20
"""The most bytes of files that are removed without a thread: two milliseconds."""
SELF = ""
"""The name of the store itself among the readers."""


class SegmentNotice(Struct, array_like=True):
    """A message to a client with its next answer: files that it may write again, and files to forget."""

    recycled: list[str] = []
    removed: list[str] = []


class Segments:
    """The files of one store. `directory`: in shared memory; `spill`: on disk. Neither may exist: they are made for
    this store, only its user may enter them, and they go with `close`, or are swept by the next store beside them.
    """

    def __init__(self, directory: str, spill: str, max_bytes: int, nodes: RowsNodes | None = None) -> None:
        """Make the directories. `max_bytes`: in the shared memory of each node. `nodes`: all that take part in the run;
        None: this one alone. Raises `StoreError`."""
        self.directory, self.spill = Path(directory), Path(spill)
        self._make_places()
        preallocate(str(self.directory), max_bytes)
        self._prepared: set[str] = set()
        """Other nodes where files are preallocated."""
        self.book = SegmentBook(max_bytes)
        self._notices: dict[str, SegmentNotice] = {}
        """Notices of clients that are connected."""
        self._tell: dict[str, Callable[[], None]] = {}
        self.nodes = nodes or RowsNodes()
        self.kept = 0
        """Number of large batches that were sent by value, since their writer has no shared memory to put them into, or
        no room."""
        self._node_of: dict[str, str] = {}
        """The node of each client; the store's own has no name."""
        places = (str(self.directory), str(self.spill))
        self.rows = RowsServer(places, takes_orders=False)
        """The server for readers on other nodes."""
        self._orders = NodeOrders(self.nodes)
        self._remote = RemoteReader(self.nodes.addresses, self.nodes.token)
        self._arena = Arena(places, f"store{os.getpid()}")
        self._mappings = SegmentMappings(places, self._on_own_reading_ended)
        self._end_own_readings_soon: DebouncedCall | None = None
        self._file_thread = FileThread()
        self._moving: set[str] = set()
        """Files on their way to disk, before they are adopted."""
        self._moved: set[str] = set()
        """Files that have come to disk, before they are adopted."""
        self._departed: set[str] = set()
        """Clients that have left files, perhaps, which are looked for next."""
        self._unclaimed_task: asyncio.Task[None] | None = None
        self._is_closed = False

    def add_client(self, client: str, tell: Callable[[], None], node: str = "") -> None:
        """Let a client write and read. `tell`: called when there is a notice for it. `node`: where it writes."""
        self.book.add_client(client)
        self._node_of[client] = node
        if node and node not in self._prepared:
            self._prepared.add(node)
            self._orders.give(node, PreallocateOrder(self.book.max_bytes))
        self._notices[client], self._tell[client] = SegmentNotice(), tell

    def node_of(self, client: str) -> str:
        """The node that a client writes on; the store's own has no name."""
        return self._node_of.get(client, "")

    async def spill_if_needed(self, placed: SegmentRef) -> None:
        """Move the batch to disk if it must be, before it is adopted; other clients are served meanwhile. Raises as
        `adopt` does."""
        if placed.node:
            return  # its node does so
        size, on_disk = self._checked(placed)
        if on_disk or not self.book.exceeds_budget(size):
            return
        name = placed.segment
        source, target = self.directory / name, self.spill / name
        self._moving.add(name)
        try:
            await self._file_thread.run(lambda: move(source, target), lambda _: _remove(source, target))
        except OSError as error:
            self.book.adopt(name, placed, self._found(name)[0], False)
            self.end(name)
            raise self._move_error(name, error) from None
        finally:
            self._moving.discard(name)
        self._moved.add(name)

    async def keep_in_thread(self, batch: pa.RecordBatch) -> SegmentRef:
        """Keep as `keep` does; other clients are served meanwhile."""

        def undo(placed: SegmentRef | None) -> None:
            if placed is not None:
                self._arena.forget([placed.segment])
                _remove(self.directory / placed.segment, self.spill / placed.segment)

        placed = await self._file_thread.run(lambda: self.keep(batch), undo)
        await self.spill_if_needed(placed)
        return placed

    def keep(self, batch: pa.RecordBatch) -> SegmentRef:
        """Write a batch that has come by value. Raises `StoreError` if there is no room."""
        self.kept += 1
        try:
            return self._arena.place(batch)
        except OSError as error:
            raise StoreError(
                f"{batch.nbytes} bytes fit neither {self.directory} nor {self.spill}: {error}. Lower "
                "store.shared_memory_mib, or set store.spill_dir to a larger disk."
            ) from None

    def adopt(self, placed: SegmentRef) -> None:
        """Take over a file that a producer has written. Raises `StoreError` if it is none, or if it must be moved to
        disk and cannot be: then it goes back to its writer, or away."""
        name = placed.segment
        if placed.node:
            self._adopt_remote(placed)
            return
        size, on_disk = self._checked(placed)
        if self.book.adopt(name, placed, size, on_disk):  # it came without `spill_if_needed`
            try:
                move(self.directory / name, self.spill / name)
            except OSError as error:
                self.end(name)
                raise self._move_error(name, error) from None
            self._carry_out(self.book.spilled(name))
        elif name in self._moved:  # clients drop their mappings, which would hold on to the pages
            self._carry_out(self.book.spilled(name))
        self._moved.discard(name)

    def _checked(self, placed: SegmentRef) -> tuple[int, bool]:
        """Bytes of a batch's file, and whether it is on disk. Raises `StoreError` if it cannot be adopted."""
        name = _named(placed)
        size, on_disk = self._found(name)
        if placed.nbytes > size or self.book.in_use(name) or name in self._moving:
            raise StoreError(f"segment {name} has {size} bytes, not the {placed.nbytes} of its batch, or is in use.")
        return size, on_disk

    def _found(self, name: str) -> tuple[int, bool]:
        """Bytes of a file, and whether it is on disk. Raises `StoreError`."""
        try:
            with suppress(FileNotFoundError):
                return os.stat(f"{self.directory}/{name}").st_size, False
            return os.stat(f"{self.spill}/{name}").st_size, True
        except OSError as error:
            raise StoreError(f"segment {name} of {self.directory} cannot be read: {error}.") from None

    def _adopt_remote(self, placed: SegmentRef) -> None:
        """Take over a file on another node, which is known by its writer's word alone."""
        name, node = _named(placed), placed.node
        if self.node_of(writer_of(name)) != node or self.book.in_use(name):
            raise StoreError(f"segment {name} of node {node} is not its writer's, or is in use.")
        if self.book.adopt(name, placed, placed.nbytes, False, node):
            self._orders.give(node, SpillOrder(name))
            self._carry_out(self.book.spilled(name))

    @contextmanager
    def held(self, refs: Sequence[SegmentRef]) -> Iterator[Callable[[Payload], Payload]]:
        """Hold these batches meanwhile, so that no writer overwrites them: mapped if they lie here, pulled when they
        are needed if not. Returns a function that puts the values of a payload in place of its references to them. It
        blocks where some lie on another node, and raises `RowsUnreachable`. Raises `StoreError` if the rows of one have
        ended."""
        for placed in refs:
            name = placed.segment
            if not self.book.in_use(name) or self.book.segments[name].content != placed:
                raise StoreError(f"segment {placed.segment}: its rows have ended.")
        if self._end_own_readings_soon is None:
            self._end_own_readings_soon = DebouncedCall(asyncio.get_running_loop(), self._end_own_readings)
        for placed in refs:
            self.book.begin_reading(SELF, placed.segment)
        try:
            local = [placed for placed in refs if not placed.node]
            batches = dict(zip(local, self._mappings.read_all(local), strict=True))
            yield lambda payload: self._resolved(payload, lambda refs: [batches[placed] for placed in refs])
        finally:
            self._mappings.skip(placed.segment for placed in refs if placed.node)

    def reader(self) -> Callable[[Payload], Payload]:
        """Return a function like that of `held`, for one thread: of batches that cannot end meanwhile, each mapped when
        it is needed and no longer."""
        mappings = SegmentMappings((str(self.directory), str(self.spill)), lambda: None)

        def read(refs: Sequence[SegmentRef]) -> list[pa.RecordBatch]:
            batches = mappings.read_all(refs)
            mappings.forget(placed.segment for placed in refs)
            mappings.ended()
            return batches

        return lambda payload: self._resolved(payload, read)

    def _resolved(self, payload: Payload, read: Callable[[Sequence[SegmentRef]], list[pa.RecordBatch]]) -> Payload:
        """Return a payload with the values in place of its references. `read`: gives those that lie here."""
        if any(placed.node for placed in payload.refs):
            payload = self._remote.fetch_blocking(payload)
        return payload.with_batches(read(payload.refs))

    def end(self, name: str) -> None:
        """Note that no row lies in a segment any more."""
        self._carry_out(self.book.end(name))

    def end_readings(self, client: str, names: list[str]) -> None:
        """Note that these readings of a client have ended."""
        for name in names:
            self._carry_out(self.book.end_reading(client, name))

    def notice(self, client: str) -> SegmentNotice | None:
        """Return the notice that is due to a client; None if there is none."""
        notice = self._notices.get(client)
        if notice is None or not (notice.recycled or notice.removed):
            return None
        self._notices[client] = SegmentNotice()
        return notice

    async def left(self, client: str) -> None:
        """Note that a client's process has ended: it reads nothing, and what it wrote and never handed over goes. Other
        clients are served meanwhile."""
        self._notices.pop(client, None)
        self._tell.pop(client, None)
        node = self._node_of.pop(client, "")
        for instructions in self.book.left(client):
            self._carry_out(instructions)
            await asyncio.sleep(0)
            if self._is_closed:
                return  # all files go
        if node:
            self._orders.give(node, SweepOrder(client, self.book.written_by(client)))
            return
        self._departed.add(client)
        if self._unclaimed_task is None:
            self._unclaimed_task = asyncio.get_running_loop().create_task(self._remove_unclaimed())

    async def _remove_unclaimed(self) -> None:
        """Look once for the files of all clients that have left meanwhile. The task that moves a file removes it
        itself."""

        def unknown(files: list[Path]) -> list[Path]:
            return [file for file in files if file.name not in self.book.segments and file.name not in self._moving]

        def look(writers: set[str]) -> list[Path]:
            return unknown(files_of_writers(writers, (self.directory, self.spill)))

        try:
            while self._departed:
                departed, self._departed = self._departed, set()
                found = await self._file_thread.run(partial(look, departed), lambda _: None)
                self._remove(unknown(found))  # again: some may have been handed over meanwhile
        except StoreClosed:
            pass  # all files go
        finally:
            self._unclaimed_task = None

    def node_lost(self, node: str) -> str | None:
        """Note that a node of Ray's is gone. Returns its name in segments, None if no large batch lay there: those of
        nodes that share their memory are with one of them, and those of the store's own with the store."""
        rows = self.nodes.by_id.get(node)
        if rows is None or rows.id != node:
            return None
        self._orders.node_lost(rows.id)
        self.nodes = self.nodes.without(rows.id)
        return rows.id

    def close(self) -> None:
        """Remove all files: no process reads or writes any more. A second time changes nothing."""
        self._is_closed = True
        self._file_thread.close()
        self._mappings.close()
        self._orders.close()
        self._remote.close()
        self.rows.close()
        for place in (self.directory, self.spill):
            remove_root(place)

    def _make_places(self) -> None:
        try:
            for place in (self.directory, self.spill):
                sweep_stale(place.parent)
                claim_root(place)
        except OSError as error:
            if place == self.spill:
                remove_root(self.directory)
            raise StoreError(
                f"the store cannot make {place}: {error}. A directory that exists is never reused. Make room in shared "
                "memory, or set store.spill_dir to a disk that this user may write to."
            ) from None

    def _carry_out(self, instructions: Instructions) -> None:
        for name in instructions.recycled:
            writer = writer_of(name)
            self._notices[writer].recycled.append(name)
            self._tell[writer]()
        for name, clients in instructions.unmapped:
            for client in clients:
                self._notices[client].removed.append(name)
                self._tell[client]()
            self._mappings.forget([name])
            self._arena.forget([name])
            self.rows.forget([name])
        for node, name in instructions.removed_remote:
            self._orders.give(node, RemoveOrder(name))
        if instructions.removed:
            self._remove([(self.spill if on_disk else self.directory) / name for name, on_disk in instructions.removed])

    def _remove(self, files: list[Path]) -> None:
        """Remove files. The kernel takes its time for the pages of large ones: 0.14 ms for each MiB of shared
        memory."""
        if sum(map(_size, files)) < REMOVED_HERE:
            _remove(*files)
            return
        with suppress(StoreClosed):  # all files go
            self._file_thread.begin(partial(_remove, *files))

    def _on_own_reading_ended(self) -> None:
        if self._end_own_readings_soon is not None:
            self._end_own_readings_soon()

    def _end_own_readings(self) -> None:
        self.end_readings(SELF, self._mappings.ended())

    def _move_error(self, name: str, error: OSError) -> StoreError:
        return StoreError(
            f"segment {name} cannot be moved to {self.spill}: {error}. Set store.spill_dir to a larger disk, or lower "
            "store.max_bytes or raise store.shared_memory_mib, so that nothing needs to be moved."
        )


def _named(placed: SegmentRef) -> str:
    """The segment of a batch. Raises `StoreError` for what is no name of a file: a client chooses it, and the store
    removes it."""
    try:
        checked(placed.segment)
    except OutsideName as error:
        raise StoreError(str(error)) from None
    return placed.segment


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError:
        return 0


def _remove(*files: Path) -> None:
    for file in files:
        with suppress(OSError):
            file.unlink()


class Intake:
    """The entrance of batches. Small ones stay where they are; large ones lie in segments, where there are any."""

    def __init__(self, spec: StoreSpec, segments: Segments | None) -> None:
        self._segments = segments
        self._inline_bytes = spec.inline_bytes
        self.lost_nodes: set[str] = set()
        """Nodes that count as lost: what lies there is not taken."""
        self.columns = {column.name: column for column in spec.columns}

    async def ready(self, sent: SentBatch) -> SentBatch:
        """Prepare a batch, so that `block` takes it without keeping other clients waiting. Raises `StoreError`; then
        nothing of it is kept."""
        if self._segments is None:
            return sent
        if isinstance(sent, SegmentRef):
            await self._segments.spill_if_needed(sent)
            return sent
        if sent.batch.nbytes <= self._inline_bytes:
            return sent
        return await self._segments.keep_in_thread(sent.batch)

    def block(self, sent: SentBatch, num_rows: int) -> ValueBlock:
        """Make a block. Raises `UnknownColumn`, `WrongType`, `WrongLength`, `StoreError`; then nothing of the batch
        is kept."""
        if isinstance(sent, SegmentRef):
            return self._adopted(sent, num_rows)
        batch = sent.batch
        types = zip(batch.schema.names, map(kind_of, batch.schema.types), strict=True)
        check_types(self.columns, types, batch.num_rows, num_rows)
        if self._segments is None or batch.nbytes <= self._inline_bytes:
            return ValueBlock(batch, None, batch.nbytes)
        return self._adopted(self._segments.keep(batch), num_rows)

    def free(self, block: ValueBlock) -> None:
        """Free a block in which no cell lies any more."""
        if block.ref is not None and self._segments is not None:
            self._segments.end(block.ref.segment)

    def _adopted(self, placed: SegmentRef, num_rows: int) -> ValueBlock:
        assert self._segments is not None
        if placed.node in self.lost_nodes:
            raise RowsLost(f"segment {placed.segment} lies on node {placed.node}, which counts as lost.")
        self._segments.adopt(placed)
        block = ValueBlock(None, placed, placed.nbytes)
        try:
            types = ((name, kind) for name, kind, _ in placed.columns)
            check_types(self.columns, types, placed.num_rows, num_rows)
        except StoreError:
            self.free(block)
            raise
        return block

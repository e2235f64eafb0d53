"""The in-memory checkpoint of one rank: a copy of its whole state in shared memory, made after every update and read by
the rank that replaces it. Called on all ranks alike.

    save(12):  begin a slot ─▶ bytes, summed while they are in the cache, by torch's number of threads ─▶ seal

    begin(12)  takes what the copy consists of: forward and backward passes may be run
    a thread   └▶ begin a slot ─▶ bytes ─▶ seal ─▶ finish(12)      the next optimizer step waits for it

The pieces lie back to back in the order in which they come, which is the same for every trainer that shards the same
model in the same way over as many ranks. They are copied once, at the speed of memory: slots (`memory_slots.py`) are
mapped once, and their pages written again and again. From a device they come through two page-locked buffers
(`weights/publication/publication.py`): it fills one while threads sum the other's into the file. The copy is complete
when `save` or `finish` returns, and a step counts only after that. The thread has a stream of its own, and takes part
in no collective.

A failure here never ends a run. Where there is no room, on any rank, none of them makes copies, and that is reported
once. Where the files vanish, the node's agent is gone, which removes them: the step has failed, as one whose node is
lost. `restore` checks before anything changes: either all ranks have the same step of the same state, or none of them
changes and all raise what is wrong with the first.
"""

import math
import mmap
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate

import torch
import xxhash
from torch import Tensor

from penstock.conf.errors import DataflowError, DeadlineExceeded, MemoryCheckpointError, PartnerGone
from penstock.workers.runtime.host_memory import page_locked_file
from penstock.workers.trainer.memory_slots import BLOCK_BYTES, Block, Header, PieceInfo, Slots, reserve_slots
from penstock.workers.trainer.policy_trainer import PolicyTrainer
from penstock.workers.trainer.ranks import Ranks, phase
from penstock.workers.trainer.training_state import TrainingState
from penstock.workers.weights.piece import Piece
from penstock.workers.weights.publication.layout import TensorPlace
from penstock.workers.weights.publication.publication import (
    DeviceCopies,
    PlacedValues,
    copy_and_sum,
    needs_buffers,
    side_stream,
)
from penstock.workers.weights.publication.publication_files import (
    POPULATE_READ,
    WritableFile,
    WritableMappings,
    populate,
)

ADVICE = "Go on from the last checkpoint (resume=auto)."
PUBLICATIONS = 3
"""Number of publications that may lie in shared memory at the same time: copies leave room for them."""


@dataclass(frozen=True)
class PendingCopy:
    """A copy that has begun."""

    step: int
    problem: "Future[str | None]" = field(default_factory=Future)
    """The reason why there are no copies from now on; None: it is there."""
    began: float = field(default_factory=time.monotonic)


class MemoryCheckpoint:
    """Lifecycle: made over a started trainer; `restore` if it replaces a rank that died; after each update `save`, or
    `begin` and `finish`; `close`."""

    def __init__(self, state: TrainingState, trainer: PolicyTrainer, root: str, *, is_saved: bool = False) -> None:
        """`root`: the directory of all ranks of the trainer. `is_saved`: checkpoints are taken, too."""
        self._is_saved = is_saved
        self._state, self._trainer, self._ranks = state, trainer, trainer.all_ranks
        self.slots = Slots(root, trainer.all_ranks.rank)
        config, device = trainer.config, trainer.ranks.device
        leaves = 0 < config.num_gpus_per_rank < 1 and not config.stays_on_device
        # From page-locked memory a rank comes back at the rate of the bus.
        self._mappings = WritableMappings(partial(page_locked_file, device=device)) if leaves else WritableMappings()
        self._threads = ThreadPoolExecutor(torch.get_num_threads())
        self._lineage: str | None = None
        """The id that all ranks share; None before the first copy."""
        self._leave_bytes = 0
        """Bytes that must stay free in shared memory beside the copies; known with the first copy."""
        self._is_off = False
        """True once no copies are made any more."""
        self._last: PendingCopy | None = None
        self._present: tuple[WritableFile, Header] | None = None
        """The copy of the state as it is now, where there is one."""
        for one in state.trainers.values():
            one.before_weights_change.append(self._expire)

    def save(self, step: int) -> str | None:
        """Copy the state after step `step`: when this returns, the copy is there, and so are those of the ranks that
        have the same rows, one of which completes them for all. None: it is there; else why there are no copies from
        now on, reported once. Collective the first time. Raises `PartnerGone` where the node's agent is gone."""
        problem = None
        if not self._is_off and (copy := self._prepared(step)) is not None:
            problem = copy if isinstance(copy, str) else self._tried(copy)
        if self._ranks.num_peers > 1:
            with phase(f"copy of the state after step {step}", self._ranks):
                self._ranks.barrier()
        return problem

    def begin(self, step: int) -> None:
        """Begin to copy the state after step `step`, in a thread. Collective the first time. What it fails with is for
        `finish` to raise."""
        self.wait_until_copied()
        last = self._last = PendingCopy(step)
        try:
            copy = None if self._is_off else self._prepared(step)
        except PartnerGone as error:
            last.problem.set_exception(error)
            return
        if copy is None or isinstance(copy, str):
            last.problem.set_result(copy)
            return
        stream = side_stream(self._ranks.device)

        def make() -> None:
            try:
                with stream:
                    last.problem.set_result(self._tried(copy))
            except BaseException as error:  # noqa: BLE001 - it is for `finish` to raise
                last.problem.set_exception(error)

        threading.Thread(target=make, name="copy of the state", daemon=True).start()

    def finish(self, step: int) -> str | None:
        """Wait until the copy is there that was begun last. May be called beside anything else, and again. Returns what
        `save` returns. Raises `PartnerGone`, also for another step, and `DeadlineExceeded`."""
        last = self._last
        if last is None or last.step != step:
            raise PartnerGone(f"rank {self._ranks.rank} has not begun to copy its state after step {step}.")
        self._wait(last)
        return last.problem.result()

    def wait_until_copied(self) -> None:
        """Wait until nothing is read that the next optimizer step changes. Raises `DeadlineExceeded`."""
        if self._last is not None:
            self._wait(self._last)

    @property
    def seconds_under_way(self) -> float | None:
        """Seconds since the copy began that is under way. None: none is. May be asked at any time."""
        last = self._last
        return None if last is None or last.problem.done() else time.monotonic() - last.began

    def kept(self) -> dict[str, Tensor]:
        """Values of the present state in the copy that was made of it, by piece: they share its memory, and must not be
        written to. Nothing where the state has changed since, or no copy is there. Waits for one under way."""
        self.wait_until_copied()
        return views_of(*self._present) if self._present is not None else {}

    def _expire(self) -> None:
        """Wait until the copy is there, which is that of the present state no longer."""
        self.wait_until_copied()
        self._present = None

    def restore(self, step: int) -> None:
        """Go on from the copies of a step. As many ranks of the same engine must have made them, and each has its own
        on its node. Collective. Raises `MemoryCheckpointError` on all ranks alike, having changed nothing."""
        self._expire()
        targets = self._state.load_targets()
        with phase(f"restoring the state after step {step}", self._ranks):
            carried = restore(self.slots, step, targets.pieces, self._ranks)
            self._state.finish_load(targets, carried)

    def give_up(self) -> None:
        """Make no more copies, and give the memory back."""
        self._is_off, self._present = True, None
        self._release()
        self.slots.remove()

    def close(self) -> None:
        """Stop making copies, once the one under way is there; those that are there stay."""
        if self._last is not None:
            wait([self._last.problem], self._ranks.timeout.total_seconds())
        self._release()

    def _release(self) -> None:
        self._threads.shutdown()
        self._mappings.close()

    def _wait(self, last: PendingCopy) -> None:
        timeout_s = self._ranks.timeout.total_seconds()
        if wait([last.problem], timeout_s).not_done:
            raise DeadlineExceeded(
                f"rank {self._ranks.rank} did not copy its state after step {last.step} within {timeout_s:g} s. Raise "
                "trainer.collective_timeout_s if it was only slow."
            )

    def _prepared(self, step: int) -> Callable[[], str | None] | str | None:
        """What copies the state after a step, as it is now; or the reason why there are no copies from now on.
        Collective the first time."""
        try:
            carried = self._state.carried()
        except DataflowError as error:  # on all ranks: they carry the same
            self.give_up()
            return f"the trainer's state is not kept, so if a rank dies it goes on from the last checkpoint: {error}"
        if self._lineage is None:
            self._leave_bytes = PUBLICATIONS * self._trainer.publication_bytes
        pieces = self._state.pieces_of_rank()
        if self._lineage is None and (problem := self._tried(lambda: self._begin(pieces))) is not None:
            return problem

        def copy() -> None:
            self._copy(step, pieces, carried)

        return copy

    def _tried(self, work: Callable[[], str | None]) -> str | None:
        """What the work returns, or the reason why it failed: then no more copies are made. Raises `PartnerGone` where
        the run's directory is gone."""
        try:
            problem = work()
        except FileNotFoundError as error:
            raise PartnerGone(
                f"the agent of the node of rank {self._ranks.rank} has ended, and the directory of the run there with "
                f"it, before the rank had copied its state: {error}"
            ) from error
        except OSError as error:
            problem = (
                f"{self.slots.directory}: the state of rank {self._ranks.rank} could not be kept there ({error}). If a "
                "rank dies, its trainer goes on from the last checkpoint. faults.keep_state=false does without copies."
            )
        if problem is not None:
            self.give_up()
        return problem

    def _begin(self, pieces: Sequence[Piece]) -> str | None:
        """Reserve room, and agree on a lineage that all ranks share. Collective: where one rank cannot, none does."""
        try:
            save_bytes = self._state.save_bytes if self._is_saved else 0
            problem = reserve_slots(self.slots, _num_bytes(pieces), self._leave_bytes, save_bytes)
        except FileNotFoundError:
            raise
        except OSError as error:
            problem = f"{self.slots.directory} cannot be made: {error}. faults.keep_state=false does without copies."
        problems, lineages = zip(*self._ranks.gather_ranks((problem, uuid.uuid4().hex)), strict=True)
        self._lineage = lineages[0]
        return next((found for found in problems if found is not None), None)

    def _copy(self, step: int, pieces: Sequence[Piece], carried: str) -> None:
        slot = self.slots.begin(step)
        file = self._mappings.map(self.slots.data(slot), self.slots.root)

        def write(share: Sequence[tuple[int, Tensor]]) -> list[tuple[int, Block]]:
            return [
                (start, Block(len(values), copy_and_sum(values, file.window(start, start + len(values)), "uint8")))
                for start, values in share
            ]

        held = list(_blocks_of(pieces))
        near = [(start, values) for start, values in held if not needs_buffers(values)]
        written = [block for blocks in self._threads.map(write, _shares_of(near)) for block in blocks]
        if len(near) < len(held):

            def write_all(parts: Sequence[PlacedValues]) -> None:
                shares = ([(start, values)] for _, start, values in parts)
                written.extend(block for blocks in self._threads.map(write, shares) for block in blocks)

            through, place = DeviceCopies(write_all), TensorPlace("state", "uint8", (_num_bytes(pieces),), 0)
            for start, values in held:
                if needs_buffers(values):
                    through.add(place, start, values)
            through.finish()
        blocks = tuple(block for _, block in sorted(written, key=lambda found: found[0]))
        assert self._lineage is not None
        header = Header(
            step, self._ranks.rank, self._ranks.num_ranks, self._lineage, _num_bytes(pieces), self._leave_bytes,
            parts_of(pieces), blocks, carried,
        )  # fmt: skip
        self.slots.seal(slot, header)
        self._present = file, header


def _num_bytes(pieces: Sequence[Piece]) -> int:
    return sum(piece.values.nbytes for piece in pieces)


def _blocks_of(pieces: Sequence[Piece]) -> Iterator[tuple[int, Tensor]]:
    """Where each block begins in the file, and its bytes."""
    start = 0
    for values in (bytes_of(piece.values) for piece in pieces if piece.values.numel()):
        for block in values.split(BLOCK_BYTES):
            yield start, block
            start += len(block)


def _shares_of(blocks: Iterable[tuple[int, Tensor]]) -> Iterator[list[tuple[int, Tensor]]]:
    """Blocks, as much at a time as a thread is to copy: handing over a small tensor alone costs more than copying
    it."""
    share: list[tuple[int, Tensor]] = []
    share_bytes = 0
    for start, block in blocks:
        if share_bytes + len(block) > BLOCK_BYTES:
            yield share
            share, share_bytes = [], 0
        share.append((start, block))
        share_bytes += len(block)
    yield share


def restore(slots: Slots, step: int, pieces: Sequence[Piece], ranks: Ranks) -> str:
    """Overwrite the pieces' values with those of a step, on all ranks or on none; return what was carried. Copies of
    later steps become invalid: these are made again. Collective. Raises `MemoryCheckpointError`."""
    copy, fault = None, None
    try:
        copy = RankCopy.open(slots, step)
        if found := copy.mismatch(pieces, ranks.num_ranks):
            fault = f"{slots.directory}: the copy of step {step} {found}. {ADVICE}"
    except (OSError, MemoryCheckpointError) as error:
        fault = str(error)
    faults, lineages = zip(*ranks.gather_ranks((fault, copy and copy.header.lineage)), strict=True)
    for found in faults:
        if found is not None:
            raise MemoryCheckpointError(found)
    if len(set(lineages)) > 1:
        raise MemoryCheckpointError(
            f"{slots.root}: the ranks' copies of step {step} are not of one state: the step was made again, and some "
            f"are of the first time. {ADVICE}"
        )
    assert copy is not None
    copy.read(pieces)
    slots.drop(after=step)
    return copy.header.carried


class RankCopy:
    """A rank's copy of a step, mapped. Lifecycle: `open`, `mismatch`, `read`."""

    def __init__(self, header: Header, memory: mmap.mmap) -> None:
        self.header, self._memory = header, memory

    @classmethod
    def open(cls, slots: Slots, step: int) -> "RankCopy":
        """Map the copy of a step. Raises `MemoryCheckpointError` if there is none."""
        copies = slots.copies()
        if step not in copies:
            raise MemoryCheckpointError(
                f"{slots.directory} has no whole copy of step {step}, only of steps {sorted(copies)}. {ADVICE}"
            )
        slot, header = copies[step]
        with slots.data(slot).open("rb") as file:
            return cls(header, mmap.mmap(file.fileno(), header.num_bytes, access=mmap.ACCESS_COPY))

    def mismatch(self, pieces: Sequence[Piece], num_ranks: int) -> str | None:
        """The reason why the copy is not these pieces' state, as half a sentence; None: it is, to the last bit."""
        if self.header.num_ranks != num_ranks:
            return f"is of a trainer of {self.header.num_ranks} ranks, and this one has {num_ranks}"
        if found := difference(parts_of(pieces), self.header.parts):
            return f"is of another trainer: {found}"
        ends = [0, *accumulate(block.num_bytes for block in self.header.blocks)]
        view = memoryview(self._memory)

        def is_whole(number: int) -> bool:
            start, end = ends[number], ends[number + 1]
            populate(self._memory, start, end, POPULATE_READ)
            return xxhash.xxh3_128_hexdigest(view[start:end]) == self.header.blocks[number].checksum

        with ThreadPoolExecutor(torch.get_num_threads()) as threads:
            wrong = [number for number, whole in enumerate(threads.map(is_whole, range(len(ends) - 1))) if not whole]
        if ends[-1] != self.header.num_bytes or wrong:
            return f"is damaged: {len(wrong)} of its {len(ends) - 1} blocks are not what was written"
        return None

    @torch.no_grad()
    def read(self, pieces: Sequence[Piece]) -> None:
        """Overwrite the pieces' values."""
        everything = torch.frombuffer(self._memory, dtype=torch.uint8)
        start = 0
        for piece in pieces:
            target = bytes_of(piece.values)
            target.copy_(everything[start : start + len(target)])
            start += len(target)


def parts_of(pieces: Iterable[Piece]) -> tuple[PieceInfo, ...]:
    """A part for each piece."""
    return tuple(
        PieceInfo(
            piece.name,
            str(piece.values.dtype).removeprefix("torch."),
            tuple(piece.shape),
            piece.first,
            tuple(piece.values.shape),
        )
        for piece in pieces
    )


def views_of(file: WritableFile, header: Header) -> dict[str, Tensor]:
    """The tensors of a copy by name, in the file's memory."""
    found, start = {}, 0
    for part in header.parts:
        dtype = getattr(torch, part.dtype)
        end = start + math.prod(part.extents) * dtype.itemsize
        if end > start:
            memory = torch.frombuffer(memoryview(file.memory)[start:end], dtype=torch.uint8)
            found[part.name] = memory.view(dtype).view(part.extents)
        start = end
    return found


def difference(wanted: Sequence[PieceInfo], found: Sequence[PieceInfo]) -> str | None:
    """The place where a copy has other pieces than a trainer, as half a sentence; None: they are the same."""
    by_name = {part.name: part for part in found}
    for part in wanted:
        other = by_name.get(part.name)
        if other != part:
            return f"{part.name!r} is {_described(part)} in this trainer, and {_described(other)} in the copy"
    if len(found) != len(wanted):
        lacking = next(part for part in found if part.name not in {part.name for part in wanted})
        return f"{lacking.name!r} is in the copy, and not in this trainer"
    return None


def _described(part: PieceInfo | None) -> str:
    if part is None:
        return "nothing"
    return f"{list(part.extents)} of {list(part.shape)} from element {part.first:,} on, {part.dtype}"


def bytes_of(values: Tensor) -> Tensor:
    """The memory of values, which are contiguous: `[num_bytes]` uint8, on their device."""
    return values.detach().view(-1).view(torch.uint8)

"""One rank's copy: its pieces as the bytes of a file, and the way back into the pieces of a trainer that was started
anew.

The pieces lie back to back in the order in which they come, which is the same for every trainer that shards the same
model in the same way over as many ranks.

`restore` is called on all ranks together, and checks before anything changes: either all of them have the same step of
the same state, or none of them changes and all raise what is wrong with the first.
"""

import mmap
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate

import torch
import xxhash
from torch import Tensor

from penstock.conf.errors import MemoryCheckpointError
from penstock.workers.trainer.memory_checkpoint.slots import Header, Part, Slots
from penstock.workers.trainer.ranks import Ranks
from penstock.workers.weights.piece import Piece
from penstock.workers.weights.publication.reused_files import POPULATE_READ, populate

ADVICE = "Go on from the last checkpoint (resume=auto)."


def parts_of(pieces: Iterable[Piece]) -> tuple[Part, ...]:
    """A part for each piece."""
    return tuple(
        Part(
            piece.name,
            str(piece.values.dtype).removeprefix("torch."),
            tuple(piece.shape),
            piece.first,
            tuple(piece.values.shape),
        )
        for piece in pieces
    )


def difference(wanted: Sequence[Part], found: Sequence[Part]) -> str | None:
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


def bytes_of(values: Tensor) -> Tensor:
    """The memory of values, which are contiguous: `[num_bytes]` uint8, on their device."""
    return values.detach().view(-1).view(torch.uint8)


class RankCopy:
    """A rank's copy of a step, mapped. Lifecycle: `open`, `fault`, `read`."""

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

    def fault(self, pieces: Sequence[Piece], num_ranks: int) -> str | None:
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


def restore(slots: Slots, step: int, pieces: Sequence[Piece], ranks: Ranks) -> str:
    """Overwrite the pieces' values with those of a step, on all ranks or on none; return what was carried. Copies of
    later steps become invalid: these are made again. Collective. Raises `MemoryCheckpointError`."""
    copy, fault = None, None
    try:
        copy = RankCopy.open(slots, step)
        if found := copy.fault(pieces, ranks.num_ranks):
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


def _described(part: Part | None) -> str:
    if part is None:
        return "nothing"
    return f"{list(part.extents)} of {list(part.shape)} from element {part.first:,} on, {part.dtype}"

"""Puts a kept copy back into the pieces of a trainer that was started anew, checked before anything changes.

Called on all ranks together: either all of them have the same step of the same state, or none of them changes and all
raise what is wrong with the first.
"""

import mmap
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate

import torch
import xxhash

from penstock.conf.errors import KeptStateError
from penstock.workers.trainer.kept.contents import bytes_of, difference, parts_of
from penstock.workers.trainer.kept.header import Header
from penstock.workers.trainer.kept.slots import Slots
from penstock.workers.trainer.ranks import Ranks
from penstock.workers.weights.piece import Piece
from penstock.workers.weights.publication.mapping import POPULATE_READ, populate

MEND = "Go on from the last checkpoint (resume=auto)."


class KeptCopy:
    """A rank's copy of a step, mapped. Lifecycle: `open`, `fault`, `read`."""

    def __init__(self, header: Header, memory: mmap.mmap) -> None:
        self.header, self._memory = header, memory

    @classmethod
    def open(cls, slots: Slots, step: int) -> "KeptCopy":
        """Map the copy of a step. Raises `KeptStateError` if there is none."""
        copies = slots.copies()
        if step not in copies:
            raise KeptStateError(
                f"{slots.directory} has no whole copy of step {step}, only of steps {sorted(copies)}. {MEND}"
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
    later steps become invalid: these are made again. Collective. Raises `KeptStateError`."""
    copy, fault = None, None
    try:
        copy = KeptCopy.open(slots, step)
        if found := copy.fault(pieces, ranks.num_ranks):
            fault = f"{slots.directory}: the copy of step {step} {found}. {MEND}"
    except (OSError, KeptStateError) as error:
        fault = str(error)
    faults, lineages = zip(*ranks.gather_ranks((fault, copy and copy.header.lineage)), strict=True)
    for found in faults:
        if found is not None:
            raise KeptStateError(found)
    if len(set(lineages)) > 1:
        raise KeptStateError(
            f"{slots.root}: the ranks' copies of step {step} are not of one state: the step was made again, and some "
            f"are of the first time. {MEND}"
        )
    assert copy is not None
    copy.read(pieces)
    slots.drop(after=step)
    return copy.header.carried

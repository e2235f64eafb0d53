"""The files of one rank's copies: two slots in turn, so that the last step's is whole until the next one's is.

    <root>/rank-3/slot-0         bytes of the rank's pieces, back to back, written over every second step
    <root>/rank-3/slot-0.json    the header: removed before the bytes change, renamed into place when they are whole

    v11 in slot 1, v12 in slot 0  ─▶ begin(13): slot 1's header goes ─▶ bytes ─▶ seal ─▶ v12, v13

So a copy with a header is whole, however its writer died, and the copy before the one that was under way has a header.
The kernel keeps the files when their writer dies; they go with the run's directory, which the node's agent owns.
"""

import shutil
from collections.abc import Collection
from pathlib import Path

from penstock.workers.trainer.kept.header import Header, from_json, to_json
from penstock.workers.whole_files import write_whole

SLOTS = (0, 1)


class Slots:
    """The slots of one rank. Lifecycle: `reserve` (`room.py`) once, then `begin`, write, `seal` for each step. One
    process at a time writes; any may read."""

    def __init__(self, root: str | Path, rank: int) -> None:
        """`root`: the directory of all ranks of a trainer, such as `<the run's directory>/states/policy`."""
        self.root, self.rank = Path(root), rank
        self.directory = self.root / f"rank-{rank}"

    def copies(self) -> dict[int, tuple[int, Header]]:
        """Slot and header of each complete copy, by step. Reads headers alone."""
        found = {}
        for slot in SLOTS:
            header = self._header(slot)
            if header is not None:
                found[header.step] = slot, header
        return found

    def data(self, slot: int) -> Path:
        return self.directory / f"slot-{slot}"

    def begin(self, step: int) -> int:
        """Choose the slot to write the copy of `step` into, and remove its header. Copies of this step and of later
        ones are removed, too: they are of steps that are made again."""
        self.drop(after=step - 1)
        copies = self.copies()
        taken = {slot: other for other, (slot, _) in copies.items()}
        slot = min(SLOTS, key=lambda slot: taken.get(slot, -1))
        self._header_file(slot).unlink(missing_ok=True)
        return slot

    def seal(self, slot: int, header: Header) -> None:
        """Write the header, once all bytes are there."""
        write_whole(self._header_file(slot), to_json(header))

    def drop(self, after: int) -> None:
        """Invalidate copies of later steps."""
        for step, (slot, _) in self.copies().items():
            if step > after:
                self._header_file(slot).unlink(missing_ok=True)

    def remove(self) -> None:
        """Remove all files of the rank, and give the memory back."""
        for slot in SLOTS:
            self._header_file(slot).unlink(missing_ok=True)
        shutil.rmtree(self.directory, ignore_errors=True)

    def _header_file(self, slot: int) -> Path:
        return self.directory / f"slot-{slot}.json"

    def _header(self, slot: int) -> Header | None:
        try:
            header = from_json(self._header_file(slot).read_bytes())
            size = self.data(slot).stat().st_size
        except FileNotFoundError:
            return None
        return header if header is not None and (header.rank, header.num_bytes) == (self.rank, size) else None


def steps_there(root: str | Path, rank: int) -> list[int]:
    """Steps whose complete copies this node has of a rank."""
    return sorted(Slots(root, rank).copies())


def ranks_there(root: str | Path) -> list[int]:
    """Ranks of which this node has had copies."""
    names = (path.name.removeprefix("rank-") for path in Path(root).glob("rank-*"))
    return sorted(int(name) for name in names if name.isdecimal())


def keep_only(root: str | Path, ranks: Collection[int], up_to: int) -> None:
    """Remove copies of other ranks, or of later steps."""
    for rank in ranks_there(root):
        if rank in ranks:
            Slots(root, rank).drop(after=up_to)
        else:
            Slots(root, rank).remove()

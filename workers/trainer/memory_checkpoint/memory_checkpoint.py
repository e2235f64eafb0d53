"""The in-memory checkpoint of one rank: a copy of its whole state in shared memory, made after every update, and read
by the ranks that come after its death. Called on all ranks alike.

    save(12):  begin a slot ─▶ bytes, summed while they are in the cache, by torch's number of threads ─▶ seal

One copy of the bytes at the speed of memory: slots are mapped once, and their pages written again and again. From a
device they come through two page-locked buffers (`weights/publication/device_copies.py`): it fills one while threads
sum the other's into the file. All of it is there when `save` returns: no optimizer step has to wait for it, and a step
that was reported can be gone on from. A failure
here never ends a run. Where there is no room, on any rank, none of them makes copies, and that is told once. Where the
files vanish, the node's agent is gone, which removes them: the step has failed, as one whose node is lost.
"""

import uuid
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from penstock.conf.errors import DataflowError, PartnerGone
from penstock.workers.trainer.memory_checkpoint.rank_copy import bytes_of, parts_of, restore
from penstock.workers.trainer.memory_checkpoint.slots import BLOCK_BYTES, Block, Header, Slots, reserve_slots
from penstock.workers.trainer.ranks import phase
from penstock.workers.trainer.trainer import PolicyTrainer
from penstock.workers.trainer.training_state import TrainingState
from penstock.workers.weights.piece import Piece
from penstock.workers.weights.publication.device_copies import DeviceCopies
from penstock.workers.weights.publication.device_copies import Part as BufferedPart
from penstock.workers.weights.publication.layout import TensorPlace
from penstock.workers.weights.publication.publication import copy_and_sum, needs_buffers
from penstock.workers.weights.publication.reused_files import WritableMappings

PUBLICATIONS = 3
"""Number of publications that may lie in shared memory at the same time: copies leave room for them."""


class MemoryCheckpoint:
    """Lifecycle: made over a started trainer; `restore` if it goes on from others' copies; `save` after each update;
    `close`."""

    def __init__(self, state: TrainingState, trainer: PolicyTrainer, root: str, *, is_saved: bool = False) -> None:
        """`root`: the directory of all ranks of the trainer. `is_saved`: checkpoints are taken, too."""
        self._is_saved = is_saved
        self._state, self._trainer, self._ranks = state, trainer, trainer.ranks
        self.slots = Slots(root, trainer.ranks.rank)
        self._mappings = WritableMappings()
        self._threads = ThreadPoolExecutor(torch.get_num_threads())
        self._lineage: str | None = None
        """The id that all ranks share; None before the first copy."""
        self._leave_bytes = 0
        """Bytes that must stay free in shared memory beside the copies; known with the first copy."""
        self._is_off = False
        """True once no copies are made any more."""

    def save(self, step: int) -> str | None:
        """Copy the state after step `step`: when this returns, the copy is there, and so are those of the ranks that
        have the same rows, one of which completes them for all. None: it is there; else why there are no copies from
        now on, told once. Collective the first time. Raises `PartnerGone` where the node's agent is gone."""
        problem = None if self._is_off else self._save(step)
        if self._ranks.num_peers > 1:
            with phase(f"copy of the state after step {step}", self._ranks):
                self._ranks.barrier()
        return problem

    def restore(self, step: int) -> None:
        """Go on from the copies of a step. As many ranks of the same engine must have made them, and each has its own
        on its node. Collective. Raises `MemoryCheckpointError` on all ranks alike, having changed nothing."""
        targets = self._state.targets()
        with phase(f"restoring the state after step {step}", self._ranks):
            carried = restore(self.slots, step, targets.pieces, self._ranks)
            self._state.take(targets, carried)

    def give_up(self) -> None:
        """Make no more copies, and give the memory back."""
        self._is_off = True
        self.close()
        self.slots.remove()

    def close(self) -> None:
        """Stop making copies; those that are there stay."""
        self._threads.shutdown()
        self._mappings.close()

    def _save(self, step: int) -> str | None:
        try:
            carried = self._state.carried()
        except DataflowError as error:  # on all ranks: they carry the same
            self.give_up()
            return f"the trainer's state is not kept, so if a rank dies it goes on from the last checkpoint: {error}"
        if self._lineage is None:
            self._leave_bytes = PUBLICATIONS * self._trainer.publication_bytes
        pieces = self._state.pieces_of_rank()
        try:
            problem = self._begin(pieces) if self._lineage is None else None
            if problem is None:
                self._copy(step, pieces, carried)
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

            def write_all(parts: Sequence[BufferedPart]) -> None:
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

"""The trainers of one rank, a policy and perhaps its critic, as one state: for checkpoints, and for in-memory
checkpoints (`memory_checkpoint.py`).

policy/weights/…  policy/exp_avg/…  policy/exp_avg_sq/…  policy/counters      critic/…      rng/<rank>
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from penstock.workers.runtime.url_files import SavedFile
from penstock.workers.trainer.checkpointing.plain_data import states_to_text
from penstock.workers.trainer.checkpointing.saver import Saver, num_copy_bytes
from penstock.workers.trainer.checkpointing.shard_files import check_files, load, read_carried
from penstock.workers.trainer.policy_trainer import PolicyTrainer
from penstock.workers.trainer.preparation import Preparation
from penstock.workers.weights.piece import Piece


@dataclass(frozen=True)
class LoadTargets:
    """Pieces that a state is read into. `counters`: those of each trainer, by their names there; `random`: the
    generator's state. Both are among the pieces."""

    pieces: list[Piece]
    counters: dict[str, dict[str, Tensor]]
    random: Piece


class TrainingState:
    """Lifecycle: made over started trainers, by name; then any of its methods, on all ranks alike."""

    def __init__(
        self, trainers: Mapping[str, PolicyTrainer], timeout_s: float = 1800.0, preparation: Preparation | None = None
    ) -> None:
        """`preparation`: stages whose functions carry something from step to step."""
        self._preparation = preparation
        self.trainers = dict(trainers)
        """The trainers by name."""
        self._ranks = next(iter(self.trainers.values())).all_ranks
        self.saver = Saver(self._ranks, timeout_s)
        for trainer in self.trainers.values():
            trainer.before_weights_change.append(self.saver.wait_until_copied)

    def begin(self, directory: str) -> bool:
        """Save the present state; training may continue. False: an earlier one is still being written. Collective.
        Raises `DataflowError` for what a function carries and no checkpoint can keep."""
        return self.saver.begin(self.pieces(), directory, self.carried())

    def finish(self) -> list[SavedFile]:
        """Wait for what `begin` started; return the files that this rank wrote. Raises `CheckpointError`,
        `DeadlineExceeded`."""
        return self.saver.finish()

    def load(self, directory: str, files: Sequence[SavedFile] = ()) -> None:
        """Go on from a checkpoint, whatever the number of ranks that wrote it. `files`: what is in it, to be checked
        first, each by one rank. Collective. Raises `CheckpointError`, having changed nothing."""
        check_files(directory, files[self._ranks.rank :: self._ranks.num_ranks])
        self._ranks.barrier()
        targets = self.load_targets()
        random = targets.random.name
        found = load(targets.pieces, directory, self._ranks, optional=(random,))
        self.finish_load(
            targets, read_carried(directory) if self._preparation is not None else "", has_random=random in found
        )

    def carried(self) -> str:
        """States that functions carry from step to step. Raises `DataflowError` for what is no plain data."""
        return self._preparation.carried() if self._preparation is not None else states_to_text({}, {})

    def pieces_of_rank(self) -> list[Piece]:
        """All pieces of this rank's state, including those that other ranks have too, in the order of `load_targets`.
        They share memory with the trainers."""
        return [*self._of_engines(), *_of_counters(self._counters()), self._random()]

    def load_targets(self) -> LoadTargets:
        """Pieces to be written into, then given to `finish_load`."""
        counters, random = self._counters(), self._random()
        return LoadTargets([*self._of_engines(), *_of_counters(counters), random], counters, random)

    def finish_load(self, targets: LoadTargets, carried: str, *, has_random: bool = True) -> None:
        """Go on from the values that the targets have now, and from what was carried. Collective."""
        for name, trainer in self.trainers.items():
            trainer.loaded(targets.counters[name])
        if self._preparation is not None:
            self._preparation.resume(carried)
        if has_random:
            torch.set_rng_state(targets.random.values)

    def pieces(self) -> Iterator[Piece]:
        """Pieces for a checkpoint: each element from one rank."""
        yield from self._of_engines()
        for name, trainer in self.trainers.items():
            for piece in _of_counters({name: trainer.counters}):
                yield piece if trainer.ranks.rank == 0 else replace(piece, values=piece.values[:0])
        yield self._random()

    @property
    def save_bytes(self) -> int:
        """Bytes of the host's memory that a save takes. Collective."""
        return num_copy_bytes(self.pieces())

    def _of_engines(self) -> Iterator[Piece]:
        for name, trainer in self.trainers.items():
            for piece in trainer.engine.state():
                yield replace(piece, name=f"{name}/{piece.name}")

    def _counters(self) -> dict[str, dict[str, Tensor]]:
        return {name: trainer.counters for name, trainer in self.trainers.items()}

    def _random(self) -> Piece:
        """State of torch's own generator, for losses that draw numbers."""
        state = torch.get_rng_state()
        return Piece(f"rng/{self._ranks.rank}", tuple(state.shape), 0, state)


def _of_counters(counters: Mapping[str, Mapping[str, Tensor]]) -> Iterator[Piece]:
    for trainer, some in counters.items():
        yield from (Piece(f"{trainer}/{name}", (2,), 0, values) for name, values in some.items())

"""The kept copies of one rank's whole state: made after every update, read by the ranks that come after its death.
Called on all ranks alike.
"""

from penstock.conf.errors import DataflowError
from penstock.workers.trainer import deadlines
from penstock.workers.trainer.kept.reading import restore
from penstock.workers.trainer.kept.writing import Keeper
from penstock.workers.trainer.trainer import PolicyTrainer
from penstock.workers.trainer.training_state import TrainingState

PUBLICATIONS = 3
"""Number of publications that may lie in shared memory at the same time: copies leave room for them."""


class KeptState:
    """Lifecycle: made over a started trainer; `restore` if it goes on from others' copies; `keep` after each update;
    `close`."""

    def __init__(self, state: TrainingState, trainer: PolicyTrainer, root: str) -> None:
        """`root`: the spec's `keeps_state`."""
        self._state, self._trainer, self._ranks = state, trainer, trainer.ranks
        self._keeper = Keeper(root, trainer.ranks)
        self._leave_bytes: int | None = None

    def keep(self, step: int) -> str | None:
        """Copy the state after step `step`: when this returns, the copy is there, and so are those of the ranks that
        have the same rows, one of which completes them for all. None: it is there; else why there are no copies from
        now on, told once. Collective the first time."""
        problem = None if self._keeper.is_off else self._copy(step)
        if self._ranks.num_peers > 1:
            with deadlines.phase(f"copy of the state after step {step}", self._ranks):
                self._ranks.barrier()
        return problem

    def restore(self, step: int) -> None:
        """Go on from the copies of a step. As many ranks of the same engine must have made them, and each has its own
        on its node. Collective. Raises `KeptStateError` on all ranks alike, having changed nothing."""
        targets = self._state.targets()
        with deadlines.phase(f"restoring the state after step {step}", self._ranks):
            carried = restore(self._keeper.slots, step, targets.pieces, self._ranks)
            self._state.take(targets, carried)

    def close(self) -> None:
        """Stop keeping copies; those that are there stay."""
        self._keeper.close()

    def _copy(self, step: int) -> str | None:
        try:
            carried = self._state.carried()
        except DataflowError as error:  # on all ranks: they carry the same
            self._keeper.give_up()
            return f"the trainer's state is not kept, so if a rank dies it goes on from the last checkpoint: {error}"
        if self._leave_bytes is None:
            self._leave_bytes = PUBLICATIONS * self._trainer.publication_bytes
        return self._keeper.keep(step, self._state.pieces_of_rank(), carried, self._leave_bytes)

"""The trainers of one rank, a policy and perhaps its critic, as one checkpoint. Used by `actor.py` and `export`.

policy/weights/…  policy/exp_avg/…  policy/exp_avg_sq/…  policy/counters      critic/…      rng/<rank>
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch

from penstock.workers.files import SavedFile
from penstock.workers.trainer.checkpointing.carried import states_to_text
from penstock.workers.trainer.checkpointing.reading import check_files, load, read_carried
from penstock.workers.trainer.checkpointing.saver import Saver
from penstock.workers.trainer.preparation import Preparation
from penstock.workers.trainer.trainer import PolicyTrainer
from penstock.workers.weights.piece import Piece


class TrainingState:
    """Lifecycle: made over started trainers, by name; then any of its methods, on all ranks alike."""

    def __init__(
        self,
        trainers: Mapping[str, PolicyTrainer],
        timeout_s: float = 1800.0,
        preparation: Preparation | None = None,
    ) -> None:
        """`preparation`: whose functions carry something from step to step."""
        self._preparation = preparation
        self._trainers = dict(trainers)
        self._ranks = next(iter(self._trainers.values())).ranks
        self._saver = Saver(self._ranks, timeout_s)
        for trainer in self._trainers.values():
            trainer.before_optimizer_step = self._saver.wait_until_copied

    def begin(self, directory: str) -> bool:
        """Save the state of now; training may go on. False: an earlier one is still being written. Collective. Raises
        `DataflowError` for what a function carries and no checkpoint can keep."""
        carried = self._preparation.carried() if self._preparation is not None else states_to_text({}, {})
        return self._saver.begin(self._pieces(), directory, carried)

    @property
    def copied_s(self) -> float:
        """What the last copy took."""
        return self._saver.copied_s

    @property
    def waited_s(self) -> float:
        """For how long copies have held up optimizer steps, in all."""
        return self._saver.waited_s

    def finish(self) -> list[SavedFile]:
        """Wait for what `begin` started: the files that this rank wrote. Raises `CheckpointError`,
        `DeadlineExceeded`."""
        return self._saver.finish()

    def load(self, directory: str, files: Sequence[SavedFile] = ()) -> None:
        """Go on from a checkpoint, whatever the number of ranks that wrote it. `files`: what is in it, to be checked
        first, each by one rank. Collective. Raises `CheckpointError`, having changed nothing."""
        check_files(directory, files[self._ranks.rank :: self._ranks.num_ranks])
        self._ranks.barrier()
        counters = {name: torch.zeros(2, dtype=torch.int64) for name in self._trainers}
        pieces = [piece for name, trainer in self._trainers.items() for piece in _named(name, trainer)]
        pieces += [Piece(f"{name}/counters", (2,), 0, values) for name, values in counters.items()]
        random = self._random()
        found = load([*pieces, random], directory, self._ranks, optional=(random.name,))
        for name, trainer in self._trainers.items():
            trainer.num_updates, num_optimizer_steps = counters[name].tolist()
            trainer.engine.loaded(num_optimizer_steps)
        if self._preparation is not None:
            self._preparation.resume(read_carried(directory))
        if random.name in found:
            torch.set_rng_state(random.values)

    def _pieces(self) -> Iterator[Piece]:
        for name, trainer in self._trainers.items():
            yield from _named(name, trainer)
            counters = torch.tensor([trainer.num_updates, trainer.engine.num_optimizer_steps()])
            yield Piece(f"{name}/counters", (2,), 0, counters if self._ranks.rank == 0 else counters[:0])
        yield self._random()

    def _random(self) -> Piece:
        """torch's own generator, for losses that draw numbers."""
        state = torch.get_rng_state()
        return Piece(f"rng/{self._ranks.rank}", tuple(state.shape), 0, state)


def _named(name: str, trainer: PolicyTrainer) -> Iterator[Piece]:
    return (replace(piece, name=f"{name}/{piece.name}") for piece in trainer.engine.state())

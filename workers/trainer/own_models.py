"""Several policies that are whole models (`trainer.own_models`), in the same ranks: each has a trainer, and that of the
first one leads. Publications, exports and hashes are of all of them; engines take the tensors of their policy.

    using("proposer") ─▶ the trainer of that policy ─▶ update(rows, loss)
    publish(root, v)  ─▶ one publication: solver/model.embed_tokens.weight, …, proposer/model.embed_tokens.weight, …
    export(directory) ─▶ directory/solver/, directory/proposer/
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from penstock.conf.trainer import TrainerConfig
from penstock.workers.trainer.policy_trainer import PolicyTrainer
from penstock.workers.trainer.ranks import Ranks
from penstock.workers.weights.piece import Piece, hash_of_pieces


class LeadingTrainer(PolicyTrainer):
    """The trainer of the first policy, with those of the others in `trainers`. What is not said above is of the first
    one alone. Made by `open_leader`; `close` closes all."""

    trainers: dict[str, PolicyTrainer]
    """All trainers by the policies' names, this one first."""

    @contextmanager
    def using(self, policy: str) -> Iterator[PolicyTrainer]:
        yield self.trainers[policy]

    def export(self, directory: str) -> dict[str, int]:
        written: dict[str, int] = {}
        for name, trainer in self.trainers.items():
            export = super().export if trainer is self else trainer.export
            written |= {f"{name}/{file}": num_bytes for file, num_bytes in export(f"{directory}/{name}").items()}
        return written

    def hash_of_weights(self) -> int:
        with self._phase("hash of the weights"):
            return hash_of_pieces(self._published())

    def _published(self) -> Iterator[Piece]:
        for name, trainer in self.trainers.items():
            for piece in trainer.engine.pieces(stacked=True):
                yield replace(piece, name=f"{name}/{piece.name}")

    def close(self) -> None:
        for trainer in self.trainers.values():
            if trainer is not self:
                trainer.close()
        super().close()  # leaves the ranks that it has joined for all


def open_leader(
    config: TrainerConfig, paths: Mapping[str, str], join: Callable[[], Ranks], **options: Any
) -> LeadingTrainer:
    """Load the model of each policy. Collective. `paths`: of the models, by policy. `join`: joins the ranks for one
    trainer. `options`: of every `PolicyTrainer`. Raises `ModelError`, `ConfigError`."""
    first, *others = paths
    leader = LeadingTrainer(config.of_policy(first), paths[first], join(), **options)
    leader.trainers = {first: leader}
    try:
        for name in others:
            leader.trainers[name] = PolicyTrainer(config.of_policy(name), paths[name], join(), **options)
        for trainer in leader.trainers.values():
            trainer.check_scores()
            trainer.try_export()
    except BaseException:
        leader.close()
        raise
    return leader


def trainers_of(trainer: PolicyTrainer) -> dict[str, PolicyTrainer]:
    """The trainers that a state is made of, by name: of each policy with a model of its own, else of all under
    `policy`."""
    return trainer.trainers if isinstance(trainer, LeadingTrainer) else {"policy": trainer}

"""Several policies that are whole models (`trainer.own_models`): each has a trainer, and the first one of a rank leads.
Publications, exports and hashes are of all of them; engines take the tensors of their policy.

    using("proposer") ─▶ the trainer of that policy ─▶ update(rows, loss)
    publish(root, v)  ─▶ one publication: solver/model.embed_tokens.weight, …, proposer/model.embed_tokens.weight, …
    export(directory) ─▶ directory/solver/, directory/proposer/

All ranks train all policies, or each policy has ranks of its own (`trainer.policies.NAME.num_ranks`). Then a rank has
the trainer of its policy alone; all ranks read all rows of a step, and each computes a share of its policy's.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from penstock.conf.trainer import TrainerConfig
from penstock.workers.trainer.policy_trainer import PolicyTrainer
from penstock.workers.trainer.publishing import Publisher
from penstock.workers.trainer.ranks import Ranks
from penstock.workers.weights.piece import Piece, hash_of_pieces


class LeadingTrainer(PolicyTrainer):
    """The trainer of a rank's first policy; `trainers` has that of each policy. What is not said above is of the first
    one alone. Made by `open_leader`; `close` closes all."""

    trainers: dict[str, PolicyTrainer]
    """This rank's trainers by the policies' names, this one first."""
    all_policies: tuple[str, ...]
    """Names of the policies of all ranks."""
    absent: dict[str, list[Piece]]
    """Pieces without elements of the policies that other ranks train; empty where there are none."""

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
        """Pieces of all policies, on every rank in the same order."""
        for name in self.all_policies:
            yield from self._named(name) if name in self.trainers else self.absent[name]

    def _named(self, policy: str) -> Iterator[Piece]:
        for piece in self.trainers[policy].engine.pieces(stacked=True):
            yield replace(piece, name=f"{policy}/{piece.name}")

    def exchange_shapes(self) -> None:
        """Exchange names and shapes of what ranks publish, so that all have one layout. Collective over all ranks."""
        own = {name: [_without_elements(piece) for piece in self._named(name)] for name in self.trainers}
        every = {name: pieces for part in self.all_ranks.gather_ranks(own) for name, pieces in part.items()}
        self.absent = {name: pieces for name, pieces in every.items() if name not in own}
        self.publisher = Publisher(self.all_ranks, self._published, self.engine_dtype)

    def close(self) -> None:
        for trainer in self.trainers.values():
            if trainer is not self:
                trainer.close()
        super().close()
        self.all_ranks.leave()  # which it has joined for all


def open_leader(
    config: TrainerConfig, paths: Mapping[str, str], join: Callable[[], Ranks], **options: Any
) -> LeadingTrainer:
    """Load the models that this rank trains. Collective. `paths`: of the models, by policy. `join`: joins the ranks.
    `options`: of every `PolicyTrainer`. Raises `ModelError`, `ConfigError`."""
    all_ranks = join()
    trainers: dict[str, PolicyTrainer] = {}
    try:
        for name in _policies_of(config, all_ranks.rank):
            own = config.of_policy(name)
            members = config.policy_ranks.get(name)
            ranks = replace(all_ranks, owned=False) if members is None else all_ranks.part(members, own)
            trainers[name] = (PolicyTrainer if trainers else LeadingTrainer)(own, paths[name], ranks, **options)
            trainers[name].all_ranks = all_ranks
            trainers[name].check_scores()
            trainers[name].try_export()
        leader = next(iter(trainers.values()))
        assert isinstance(leader, LeadingTrainer)
        leader.trainers, leader.all_policies, leader.absent = trainers, config.own_models, {}
        if config.policy_ranks:
            leader.exchange_shapes()
    except BaseException:
        for trainer in trainers.values():
            PolicyTrainer.close(trainer)
        all_ranks.leave()
        raise
    return leader


def _policies_of(config: TrainerConfig, rank: int) -> list[str]:
    """The policies that a rank trains."""
    return [name for name in config.own_models if rank in config.policy_ranks.get(name, (rank,))]


def _without_elements(piece: Piece) -> Piece:
    return replace(piece, first=0, values=piece.values.new_empty(0, device="cpu"))


def trainers_of(trainer: PolicyTrainer) -> dict[str, PolicyTrainer]:
    """The trainers that a rank's state is made of, by name: of each policy with a model of its own, else of all under
    `policy`."""
    return trainer.trainers if isinstance(trainer, LeadingTrainer) else {"policy": trainer}

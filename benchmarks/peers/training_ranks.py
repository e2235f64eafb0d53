"""One of several ranks of the training benchmark, over gloo on this machine, each with one thread:

    python -m benchmarks.peers.training_ranks RANK NUM_RANKS ADDRESS MODEL FILE NUM_ROUNDS COUNT

Sides are values of `trainer.sequence_parallel_size`, with rows packed in micro-batches of as many tokens a rank; they
alternate. Rank 0 writes rounds to FILE: {"side": value, "longest_cpu_seconds": s, "exchanged_bytes": n, ...}.

`longest_cpu_seconds`: processor time of a micro-batch's forward and backward on the rank that took most, summed over
micro-batches. `exchanged_bytes`: sent by all ranks in all-to-alls.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.peers.training_rows import PROMPT_TOKENS, make_rows
from penstock.algorithms.losses import ppo_clip_loss
from penstock.conf.trainer import TrainerConfig
from penstock.orchestrator.loops.verbs import shares_of
from penstock.workers.trainer.pass_trial import measured_costs
from penstock.workers.trainer.policy_trainer import PolicyTrainer
from penstock.workers.trainer.ranks import Ranks
from penstock.workers.trainer.update.rank_groups import EXCHANGED

LONGEST, MEAN, SIGMA = 8192, 512, 1.2
"""Tokens of the longest row, and mean and sigma of lognormal lengths."""
MEDIAN = int(MEAN * np.exp(-(SIGMA**2) / 2)) - PROMPT_TOKENS
SIDES: tuple[int | str, ...] = (1, 2, 4, "auto")


class MeasuredEngine:
    """An engine, and what each pass costs this rank."""

    def __init__(self, engine: Any, num_layers: int, width: int) -> None:
        self._engine, self._token_bytes = engine, num_layers * EXCHANGED * width * 4
        self._size, self._started = engine.split_sizes[-1], 0.0
        self.seconds: list[float] = []
        self.num_bytes = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def split_over(self, size: int | None) -> None:
        self._size = size or self._engine.split_sizes[-1]
        self._engine.split_over(size)

    def before_backward(self, is_last: bool) -> None:
        self._started = time.process_time()
        self._engine.before_backward(is_last)

    def forward(self, input_ids_BL: torch.Tensor, *rest: Any) -> Any:
        self.num_bytes += input_ids_BL.numel() / self._size * (1 - 1 / self._size) * self._token_bytes
        return self._engine.forward(input_ids_BL, *rest)

    def backward(self, loss: torch.Tensor) -> None:
        self._engine.backward(loss)
        self.seconds.append(time.process_time() - self._started)


def make_trainer(side: int | str, model: str, rank: int, num_ranks: int, address: str) -> PolicyTrainer:
    size = side if isinstance(side, int) else 1
    config = TrainerConfig(
        num_ranks=num_ranks, sequence_parallel_size=side, packing="always", max_tokens_per_microbatch=size * LONGEST
    )
    trainer = PolicyTrainer(config, model, Ranks.join(config, rank, num_ranks, address))
    if side == "auto":
        trainer.split_by(measured_costs(trainer))
    return trainer


def measure(trainer: PolicyTrainer, vocabulary: int, count: int, seed: int) -> dict[str, Any]:
    rows = make_rows(
        seed, vocabulary, count=count, response_tokens=MEDIAN, spread=SIGMA, longest=LONGEST - PROMPT_TOKENS
    )
    lengths = (rows.lengths("prompt_ids") + rows.lengths("response_ids")).tolist()
    ranks, plain = trainer.ranks, trainer.engine
    own = shares_of(lengths, ranks.num_ranks, ranks.num_peers)[ranks.rank]
    engine = MeasuredEngine(plain, trainer.size.num_layers, trainer.size.width)
    trainer.engine = engine  # type: ignore[assignment]
    ranks.barrier()
    started = time.perf_counter()
    seconds = trainer.update(rows.select(own), ppo_clip_loss).seconds
    elapsed, trainer.engine = time.perf_counter() - started, plain
    passes = zip(*ranks.gather_ranks(engine.seconds), strict=True)
    return {
        "seconds": elapsed,
        "plan_seconds": max(ranks.gather_ranks(seconds["plan"])),
        "longest_cpu_seconds": sum(map(max, passes)),
        "cpu_seconds": sum(ranks.gather_ranks(sum(engine.seconds))),
        "exchanged_bytes": sum(ranks.gather_ranks(engine.num_bytes)),
        "passes": len(engine.seconds),
        "tokens": sum(lengths),
        "longest": max(lengths),
    }


def main() -> None:
    rank, num_ranks, address, model = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
    file, num_rounds, count = Path(sys.argv[5]), int(sys.argv[6]), int(sys.argv[7])
    torch.set_num_threads(1)
    trainers = {side: make_trainer(side, model, rank, num_ranks, address) for side in SIDES}
    vocabulary = trainers[1].model.lm.config.vocab_size
    rounds = list[dict[str, Any]]()
    for number in range(-1, num_rounds):
        for side, trainer in trainers.items():
            measured = measure(trainer, vocabulary, count if number >= 0 else 4, number + 1)
            if number >= 0:
                rounds.append({"case": "ranks", "side": str(side), "round": number, **measured})
                if rank == 0:
                    file.write_text(json.dumps(rounds))
    trainers[1].close()


if __name__ == "__main__":
    main()

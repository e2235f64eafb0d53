"""Several passes over a batch, for a policy that is a table of logits: the loop that the trainer is tested to be
(`tests/workers/trainer/test_trainer.py`), and the columns of a batch by row."""

import torch

from penstock.algorithms.aggregation import BatchTotals
from penstock.algorithms.losses import policy_loss

VOCABULARY, RATE = 5, 3.0
Columns = dict[str, torch.Tensor]


class Table:
    """A policy: logits of each position of each row, which are trained by plain gradient descent."""

    def __init__(self, columns: Columns, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        shape = (*columns["mask"].shape, VOCABULARY)
        self.logits = torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()
        self._tokens = torch.randint(VOCABULARY, columns["mask"].shape, generator=generator)

    def logprobs(self, rows: torch.Tensor | slice = slice(None)) -> torch.Tensor:
        """`[B, T]` float64 of the tokens, with gradient."""
        chosen = self.logits[rows].log_softmax(-1)
        return chosen.gather(-1, self._tokens[rows][..., None]).squeeze(-1)

    def step(self, loss: torch.Tensor) -> None:
        (gradient,) = torch.autograd.grad(loss, self.logits)
        with torch.no_grad():
            self.logits -= RATE * gradient


def of_rows(columns: Columns, rows: torch.Tensor) -> Columns:
    return {name: column[rows] for name, column in columns.items()}


def train(columns: Columns, seed: int, minibatches: list[torch.Tensor], epochs: int, **settings: object) -> Table:
    """Train in passes over the minibatches, against the log-probabilities of the batch's start."""
    table = Table(columns, seed)
    old = table.logprobs().detach()
    for _ in range(epochs):
        for rows in minibatches:
            part = of_rows(columns, rows)
            loss, _ = policy_loss(
                table.logprobs(rows),
                mask=part["mask"],
                totals=BatchTotals.of(part["mask"]),
                advantage=part["advantage"],
                behavior_logprobs=old[rows],
                old_logprobs=old[rows],
                proximal_logprobs=old[rows],
                correction="none",
                proximal="column",
                **settings,
            )
            table.step(loss)
    return table

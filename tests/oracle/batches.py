"""Random ragged batches, and the comparison of a loss with somebody else's, value and gradient."""

import torch
from hypothesis import strategies as st

from penstock.algorithms.aggregation import BatchTotals
from penstock.algorithms.losses import policy_loss

SEEDS = st.integers(0, 2**20)
TOLERANCE = {"rtol": 1e-5, "atol": 1e-9}
LOSS_TOLERANCE = {**TOLERANCE, "atol": 1e-7}


def batch(seed, rows=6, width=7, shortest=1):
    """Log-probabilities, a ragged mask and advantages, float64. Padding is zero: others do not promise to ignore it."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(shortest, width + 1, (rows, 1), generator=generator)
    mask = torch.arange(width) < lengths

    def logprobs(spread):
        return torch.where(mask, -1 - spread * torch.rand(rows, width, generator=generator, dtype=torch.float64), 0.0)

    names = ("logprobs", "old_logprobs", "behavior_logprobs", "reference_logprobs")
    columns = {name: logprobs(0.8) for name in names}
    return columns | {"mask": mask, "advantage": torch.randn(rows, generator=generator, dtype=torch.float64)}


def ours(columns, **settings):
    """Our loss and its gradient. By default the ratio is of old_logprobs, and nothing corrects."""
    leaf = columns["logprobs"].clone().requires_grad_()
    others = {name: value for name, value in columns.items() if name not in ("logprobs", "reference_logprobs")}
    if "kl_coef" in settings:
        others["reference_logprobs"] = columns["reference_logprobs"]
    defaults = {"correction": "none", "proximal": "column"}
    loss, _ = policy_loss(
        leaf,
        totals=BatchTotals.of(columns["mask"]),
        proximal_logprobs=columns["old_logprobs"],
        **others,
        **(defaults | settings),
    )
    return loss.detach(), torch.autograd.grad(loss, leaf)[0]


def theirs(columns, loss_of):
    """Somebody else's loss, a function of the log-probabilities, and its gradient."""
    leaf = columns["logprobs"].clone().requires_grad_()
    loss = loss_of(leaf)
    return loss.detach(), torch.autograd.grad(loss, leaf)[0]


def assert_same(one, other):
    """Loss and gradient. A loss is a mean of numbers of both signs and may be much smaller than they are; the others
    hold some settings in float32, which leaves 1e-7 of those numbers."""
    for (got, expected), tolerance in zip(zip(one, other, strict=True), (LOSS_TOLERANCE, TOLERANCE), strict=True):
        torch.testing.assert_close(got, expected, **tolerance)

"""Random batches of responses of different lengths, and a loss on one."""

import torch

OTHERS = ("old_logprobs", "behavior_logprobs", "reference_logprobs")


def columns_of(seed, rows=4, width=5, dtype=torch.float64):
    """Columns as the trainer hands them over, the mask among them. Some rows have no token."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, width + 1, (rows, 1), generator=generator)
    columns = {
        name: (-2 * torch.rand(rows, width, generator=generator, dtype=torch.float64)).to(dtype)
        for name in ("logprobs", *OTHERS)
    }
    columns["advantage"] = torch.randn(rows, generator=generator, dtype=torch.float64).to(dtype)
    return columns | {"mask": torch.arange(width) < lengths}


def batch(seed, rows, width, dtype=torch.float64):
    """The same as log-probabilities, mask and other columns."""
    columns = columns_of(seed, rows, width, dtype)
    return columns.pop("logprobs"), columns.pop("mask"), columns


def run(loss, logprobs, mask, columns, totals):
    logprobs = logprobs.clone().requires_grad_()
    value, metrics = loss(logprobs, mask, totals, **columns)
    value.backward()
    return value.detach(), logprobs.grad, metrics

"""Compiled layers compute what they computed before, under the same names. Two ranks: `test_ranks.py`."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch._dynamo.utils import counters

from penstock.algorithms.losses import ppo_clip_loss
from penstock.conf.trainer import LoraConfig
from penstock.store.data.rows import Rows
from penstock.workers.trainer.policy_trainer import PolicyTrainer
from tests.amounts import IS_MANY

pytestmark = pytest.mark.real
LINEAR = {"lr": 1.0, "eps": 1.0, "betas": [0.0, 0.0]}
"""AdamW whose step is -g / (|g| + 1): weights show the gradient."""
Make = Callable[..., PolicyTrainer]


@pytest.fixture(autouse=True)
def compiler() -> Iterator[None]:
    """Nothing of other tests counts towards the compiler's limits, beyond which it would silently compile no more; and
    something has been compiled. Graphs are made as always, and run without the code of inductor, which takes minutes to
    make: `test_ranks.py` has it, and the soak."""
    torch.compiler.reset()
    counters.clear()
    if not IS_MANY:
        torch.compiler.set_default_backend("eager")
    yield
    torch.compiler.set_default_backend("inductor")
    assert counters["stats"]["unique_graphs"] >= 2  # with gradient, and without where log-probabilities are asked for
    torch.compiler.reset()


def names(trainer: PolicyTrainer, directory: Path) -> tuple[list[str], list[str]]:
    """Names of tensors in a publication, and in a checkpoint."""
    publication = trainer.publish(str(directory), 1)
    with safe_open(Path(publication.directory) / "model.safetensors", "pt") as file:
        published = sorted(file.keys())
    return published, [piece.name for piece in trainer.engine.state()]


@pytest.mark.parametrize(
    ("engine", "options", "same_length"),
    [
        ("fsdp", {"activation_checkpointing": True, "lora": LoraConfig(rank=4)}, not IS_MANY),
        ("zero2", {"dtype": "bfloat16"}, False),
        ("fsdp", {"packing": "always"}, False),
    ],
    ids=["fsdp-recomputed-adapters", "zero2-bfloat16", "fsdp-packed"],
)
def test_two_updates_are_those_of_the_eager_trainer(
    make_trainer: Make,
    make_rows: Callable[..., Rows],
    weights_of: Callable[..., Any],
    tmp_path: Path,
    options: Any,
    same_length: bool,
) -> None:
    """`same_length`: micro-batches have more than one row each, so that half as much is compiled."""
    make_rows = partial(make_rows, 12, same_length=same_length)
    metrics, weights, logprobs, named = [], [], [], []
    for compiled in (False, True):
        trainer = make_trainer(compile=compiled, max_tokens_per_microbatch=60, **LINEAR, **options)
        reports = [trainer.update(make_rows(seed=seed), ppo_clip_loss) for seed in range(2)]
        metrics.append([(report.metrics["actor/pg_loss"], report.metrics["actor/grad_norm"]) for report in reports])
        logprobs.append(np.concatenate(trainer.logprobs(make_rows(seed=2))))
        weights.append(weights_of(trainer))
        named.append(names(trainer, tmp_path / str(compiled)))
    tolerance = 1e-4 if "dtype" not in options else 2e-2
    np.testing.assert_allclose(metrics[1], metrics[0], atol=tolerance)
    np.testing.assert_allclose(logprobs[1], logprobs[0], atol=tolerance)
    for name, weight in weights[0].items():
        np.testing.assert_allclose(weights[1][name], weight, atol=tolerance, err_msg=name)
    assert named[1] == named[0]

"""Updates of rows without padding are those of padded rows, whatever the loss, engine and model."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from penstock.algorithms.losses import SURROGATES, policy_loss, sft_loss, value_loss, with_entropy_bonus
from penstock.algorithms.losses.preference import (
    bradley_terry_loss,
    dpo_loss,
    ipo_loss,
    kto_loss,
    orpo_loss,
    simpo_loss,
)
from penstock.conf.errors import ConfigError
from penstock.conf.trainer import LoraConfig, OptimizerConfig, TrainerConfig
from penstock.store.data.rows import Rows
from penstock.workers.agents.trajectory import Trajectory, row_columns
from penstock.workers.trainer.policy_trainer import PolicyTrainer
from penstock.workers.trainer.scalar import CriticTrainer, ScalarTrainer
from tests.workers.histories import turn
from tests.workers.trainer.conftest import ENGINES, copy_of_weights

Make = Callable[..., PolicyTrainer]
LINEAR: dict[str, Any] = {"lr": 1.0, "eps": 1.0, "betas": [0.0, 0.0], "clip_norm": 0.0}
"""AdamW whose step is -g / (|g| + 1): weights after one update show the gradient."""
PACKINGS = ("never", "always")
POLICY = {name: partial(policy_loss, surrogate=name) for name in SURROGATES}
PAIRS = {"dpo": dpo_loss, "ipo": ipo_loss, "simpo": simpo_loss, "orpo": orpo_loss, "kto": kto_loss}
LOSSES: dict[str, Any] = POLICY | PAIRS | {"sft": sft_loss, "entropy": with_entropy_bonus(policy_loss, 0.1)}
OF_ENGINES = [(engine, {}) for engine in ENGINES] + [
    ("fsdp", {"activation_checkpointing": True}),
    ("fsdp", {"lora": LoraConfig(rank=4)}),
    ("zero3", {"activation_checkpointing": True}),
]


@pytest.fixture
def engine(request: pytest.FixtureRequest) -> str:
    return getattr(request, "param", "fsdp")


def rows_of(make_rows: Callable[..., Rows]) -> Rows:
    """Rows with what every loss reads."""
    rows = make_rows(8)
    rows = rows.with_column("reference_logprobs", rows.arrays("behavior_logprobs"))
    half = (np.arange(8) % 2).astype(np.float32)
    return rows.with_column("preferred", 2 * half - 1).with_column("desirable", half)


def assert_near(ours: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert ours.keys() == expected.keys()
    for name, weight in expected.items():
        torch.testing.assert_close(ours[name], weight, atol=2e-6, rtol=0, msg=name)


@pytest.mark.parametrize("loss", LOSSES)
def test_every_loss_has_the_gradient_of_padded_rows(
    make_trainer: Make, make_rows: Callable[..., Rows], loss: str
) -> None:
    rows, weights, metrics = rows_of(make_rows), [], []
    for packing in PACKINGS:
        trainer = make_trainer(packing=packing, **LINEAR)
        metrics.append(trainer.update(rows, LOSSES[loss]).metrics)
        weights.append(copy_of_weights(trainer))
    assert_near(weights[1], weights[0])
    assert metrics[0].pop("actor/padding_share") > 0
    assert metrics[1].pop("actor/padding_share") == 0
    assert metrics[1] == pytest.approx(metrics[0], rel=1e-4, abs=1e-6)


@pytest.mark.parametrize(("engine", "options"), OF_ENGINES, indirect=["engine"])
def test_every_engine_has_the_answers_of_padded_rows(
    make_trainer: Make, make_rows: Callable[..., Rows], options: dict[str, Any]
) -> None:
    """In several micro-batches and optimizer steps, with the log-probabilities of before the update."""
    rows, weights, logprobs = rows_of(make_rows), [], []
    for packing in PACKINGS:
        trainer = make_trainer(
            packing=packing, max_tokens_per_microbatch=50, num_minibatches=2, **(LINEAR | {"lr": 1e-2} | options)
        )
        trainer.update(rows, policy_loss)
        weights.append(copy_of_weights(trainer))
        logprobs.append(np.concatenate(trainer.logprobs(rows)))
    assert_near(weights[1], weights[0])
    np.testing.assert_allclose(logprobs[1], logprobs[0], atol=1e-5)


@pytest.mark.parametrize(("kind", "loss"), [(CriticTrainer, value_loss), (ScalarTrainer, bradley_terry_loss)])
def test_critics_and_scorers_have_the_answers_of_padded_rows(
    model_path: str, make_rows: Callable[..., Rows], kind: type[ScalarTrainer], loss: Any
) -> None:
    answers = []
    for packing in PACKINGS:
        trainer = kind(TrainerConfig(packing=packing, optimizer=OptimizerConfig(lr=1e-2)), model_path)
        rows = rows_of(make_rows)
        returns = [np.linspace(-1, 1, length, dtype=np.float32) for length in rows.lengths("response_ids")]
        for _ in range(2):  # a new head says nothing
            trainer.update(rows.with_column("returns", returns).with_column("old_values", trainer.values(rows)), loss)
        answers.append(np.concatenate([*trainer.values(rows), trainer.scores(rows)]))
        trainer.close()
    assert np.ptp(answers[0]) > 1e-3
    np.testing.assert_allclose(answers[1], answers[0], atol=1e-5)


def test_segments_of_a_trajectory_do_not_see_one_another(make_trainer: Make) -> None:
    histories = [
        [turn(0, [1, 2], [3, 4]), turn(1, [9, 7, 5, 6], [8])],
        [turn(0, [1], [2]), turn(1, [1, 2, 3], [4, 5])],
    ]
    rows = Rows.from_lists(row_columns([Trajectory(turns) for turns in histories]))
    padded, packed = (make_trainer(packing=packing).logprobs(rows) for packing in PACKINGS)
    for ours, expected in zip(packed, padded, strict=True):
        np.testing.assert_allclose(ours, expected, atol=1e-5)


def test_a_packed_reference_says_of_a_row_what_it_says_of_it_alone(
    make_trainer: Make, make_rows: Callable[..., Rows]
) -> None:
    rows, reference = make_rows(6), make_trainer(trainable=False, rows_alone=True, packing="always")
    together = reference.logprobs(rows)
    for position in range(6):
        assert reference.logprobs(rows.select([position]))[0].tobytes() == together[position].tobytes()


def test_a_value_that_packing_does_not_know_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"trainer\.packing=on.*auto"):
        TrainerConfig(packing="on")


def test_packing_eager_attention_is_refused_when_the_model_is_made(make_trainer: Make) -> None:
    with pytest.raises(ConfigError, match=r"trainer\.packing=always: .* model\.attention=eager"):
        make_trainer(packing="always", attention="eager")

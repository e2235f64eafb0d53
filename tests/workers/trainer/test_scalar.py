"""Models with one number for an output: critics by token, reward models by response."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification

from penstock.algorithms.graph.dataflow import Dataflow
from penstock.algorithms.losses import value_loss
from penstock.algorithms.losses.policy import sft_loss
from penstock.algorithms.losses.preference import bradley_terry_loss
from penstock.conf.errors import DataflowError, ModelError
from penstock.conf.trainer import OptimizerConfig, TrainerConfig
from penstock.store.data.rows import Rows
from penstock.workers.trainer.models.language_model import open_scalar_lm
from penstock.workers.trainer.preparation import Preparation
from penstock.workers.trainer.scalar import CriticTrainer, ScalarTrainer
from tests.workers.trainer.conftest import ENGINES, random_rows


@pytest.fixture(params=ENGINES)
def engine(request):
    return request.param


@pytest.fixture
def make_scalar(model_path, engine_options):
    made = []

    def make(path=model_path, kind=ScalarTrainer, **options):
        made.append(kind(TrainerConfig(optimizer=OptimizerConfig(lr=1e-2), **engine_options), path, **options))
        return made[-1]

    yield make
    for trainer in reversed(made):
        trainer.close()


def with_targets(rows: Rows, trainer: ScalarTrainer, target: float) -> Rows:
    returns = [np.full(length, target, np.float32) for length in rows.lengths("response_ids")]
    return rows.with_column("returns", returns).with_column("old_values", trainer.values(rows))


def test_a_new_head_expects_nothing_and_has_no_opinion(make_scalar):
    rows = random_rows(6)
    trainer = make_scalar()
    values = trainer.values(rows)
    assert [len(row) for row in values] == rows.lengths("response_ids").tolist()
    assert not any(row.any() for row in values)
    assert trainer.scores(rows).tolist() == [0.0] * 6


def test_a_critic_learns_its_returns_and_reports_under_its_name(make_scalar):
    rows = random_rows(6)
    critic = make_scalar(kind=CriticTrainer)
    errors = []
    for _ in range(30):
        report = critic.update(with_targets(rows, critic, 0.7), value_loss)
        errors.append(report.metrics["critic/value_loss"])
    assert errors[0] == pytest.approx(0.7**2 / 2, rel=1e-5)
    assert errors[-1] < 0.1 * errors[0]
    assert {"critic/lr", "critic/grad_norm", "critic/return_mean"} <= report.metrics.keys()
    assert not any(name.startswith(("actor/", "mismatch/")) for name in report.metrics)


def test_values_are_read_where_a_token_is_predicted_and_scores_at_the_last(make_scalar, tmp_path):
    rows = random_rows(3)
    trainer = make_scalar()
    for _ in range(3):
        trainer.update(with_targets(rows, trainer, 0.7), value_loss)
    trainer.export(str(tmp_path / "model"))
    plain = AutoModelForSequenceClassification.from_pretrained(tmp_path / "model").eval()
    for index in range(3):
        prompt, response = rows.arrays("prompt_ids")[index].tolist(), rows.arrays("response_ids")[index].tolist()
        with torch.no_grad():
            hidden = plain.base_model(torch.tensor([prompt + response])).last_hidden_state[0]
            numbers = plain.score(hidden).squeeze(-1).numpy()
        np.testing.assert_allclose(trainer.values(rows)[index], numbers[len(prompt) - 1 : -1], rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(trainer.scores(rows)[index], numbers[-1], rtol=1e-4, atol=1e-5)
    assert abs(numbers).max() > 1e-3


def test_a_reward_model_learns_to_prefer_and_is_written_as_a_classifier(make_scalar, tmp_path):
    rows = random_rows(12).with_column("preferred", np.tile([1.0, -1.0], 6).astype(np.float32))
    trainer = make_scalar()
    for _ in range(20):
        report = trainer.update(rows, bradley_terry_loss)
    assert report.metrics["actor/accuracy"] == 1.0
    scores = trainer.scores(rows)
    assert (scores[::2] > scores[1::2]).all()
    trainer.export(str(tmp_path / "model"))
    again = make_scalar(str(tmp_path / "model"), trainable=False)
    np.testing.assert_allclose(again.scores(rows), scores, rtol=1e-5, atol=1e-6)
    assert AutoModelForSequenceClassification.from_pretrained(tmp_path / "model").config.num_labels == 1


def test_micro_batches_change_nothing(make_scalar):
    rows = random_rows(8).with_column("preferred", np.tile([1.0, -1.0], 4).astype(np.float32))
    losses = []
    for budget in (30, 10_000):
        trainer = make_scalar()
        trainer.config.max_tokens_per_microbatch = budget
        for _ in range(3):
            report = trainer.update(rows, bradley_terry_loss)
        losses.append(report.metrics["actor/loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_what_a_critic_explains_is_of_the_whole_batch_however_it_is_cut(make_scalar):
    rows = random_rows(8)
    returns = [
        np.linspace(0, index, length, dtype=np.float32) for index, length in enumerate(rows.lengths("response_ids"))
    ]
    flow = Dataflow().rollout(samples_per_prompt=1).values()
    flow.train_critic(
        loss=lambda values, mask, totals, old_values, returns: value_loss(values, mask, totals, returns, old_values)
    )
    explained = []
    for budget in (30, 10_000):
        critic = make_scalar(kind=CriticTrainer)
        critic.config.max_tokens_per_microbatch = budget
        preparation = Preparation(flow.in_trainer, flow.columns, lambda mine: [mine], critic)
        for _ in range(3):
            prepared, metrics = preparation.apply(rows.with_column("returns", returns), 0)
        explained.append(metrics["critic/explained_variance"])
    errors = np.concatenate(returns) - np.concatenate(prepared.arrays("old_values"))
    assert explained[0] == pytest.approx(1 - errors.var() / np.concatenate(returns).var(), rel=1e-4)
    assert explained[0] == pytest.approx(explained[1], rel=1e-4)
    assert "critic/return_square_mean" not in metrics


def test_a_loss_of_another_kind_of_model_is_refused(make_scalar):
    with pytest.raises(DataflowError, match="takes 'logprobs', and the model that it trains gives values"):
        make_scalar().update(random_rows(2), sft_loss)


def test_a_path_without_a_model_is_named(tmp_path):
    with pytest.raises(ModelError, match=r"model.path=.*no model with a scalar head"):
        open_scalar_lm(str(tmp_path))

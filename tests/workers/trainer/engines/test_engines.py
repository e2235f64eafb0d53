"""The promises of every engine on weights and states, on one rank, and their learning rates. More ranks:
`test_ranks.py`."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from penstock.algorithms.losses import sft_loss
from penstock.conf.errors import ModelError
from penstock.conf.trainer import OptimizerConfig, TrainerConfig
from penstock.store.data.rows import Rows
from penstock.workers.protocols import AdamParams
from penstock.workers.trainer.engines.train_engine import learning_rate, make_engine
from penstock.workers.trainer.models.language_model import PolicyModel, load_causal_lm, open_causal_lm
from penstock.workers.trainer.models.token_scores import LogitChange
from penstock.workers.trainer.policy_trainer import PolicyTrainer
from penstock.workers.trainer.ranks import Ranks
from tests.workers.trainer.conftest import ENGINES, put_state, random_rows, whole, whole_state

Make = Callable[..., PolicyTrainer]


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> str:
    return request.param


def learn(trainer: PolicyTrainer, rows: Rows, num_steps: int) -> list[float]:
    return [trainer.update(rows, sft_loss).metrics["actor/loss"] for _ in range(num_steps)]


def test_a_state_has_weights_and_moments_of_everything_trained_in_float32(make_trainer: Make) -> None:
    trainer = make_trainer(dtype="bfloat16")
    names = {piece.name for piece in trainer.engine.pieces()}
    state = whole_state(trainer)
    assert state.keys() == {f"{kind}/{name}" for kind in ("weights", "exp_avg", "exp_avg_sq") for name in names}
    assert {tensor.dtype for tensor in state.values()} == {torch.float32}
    assert not any(tensor.any() for name, tensor in state.items() if name.startswith("exp_avg"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("steps_before_loading", [0, 2])
def test_training_goes_on_from_a_loaded_state_as_if_nothing_had_happened(
    make_trainer: Make, dtype: str, steps_before_loading: int
) -> None:
    rows = random_rows(6)
    first = make_trainer(lr=1e-2, dtype=dtype)
    learn(first, rows, 3)
    state, steps = whole_state(first), first.engine.num_optimizer_steps()
    assert steps == 3
    second = make_trainer(lr=1e-2, dtype=dtype)
    learn(second, random_rows(6, seed=1), steps_before_loading)
    put_state(second, state, steps)
    for ours, theirs in zip(second.logprobs(rows), first.logprobs(rows), strict=True):
        assert np.array_equal(ours, theirs)
    assert learn(second, rows, 3) == learn(first, rows, 3)
    expected, result = whole_state(first), whole_state(second)
    assert all(torch.equal(result[name], expected[name]) for name in expected)
    assert second.engine.num_optimizer_steps() == 6


@pytest.mark.parametrize("options", [{}, {"dtype": "bfloat16"}, {"trainable": False}], ids=str)
def test_logprobs_that_are_not_by_the_models_own_logits_are_refused(make_trainer: Make, options: Any) -> None:
    trainer = make_trainer(**options)
    before = trainer.logprobs(random_rows(6))
    trainer.check_scores()
    assert all(map(np.array_equal, trainer.logprobs(random_rows(6)), before))
    trainer.model.lm.get_output_embeddings().change = LogitChange(scale=20.0)
    with pytest.raises(ModelError, match=r"of Qwen2ForCausalLM are .* nats a token away .* Choose another model\.path"):
        trainer.check_scores()


def test_what_is_not_trained_keeps_its_weights_and_is_published_all_the_same(
    engine: str, engine_options: dict[str, Any], model_path: str
) -> None:
    before = {name: parameter.detach() for name, parameter in load_causal_lm(model_path).named_parameters()}
    lm, weights = open_causal_lm(model_path)
    model = PolicyModel(lm).requires_grad_(False)
    lm.model.layers[1].requires_grad_(True)
    config = TrainerConfig(**engine_options, optimizer=OptimizerConfig(lr=1e-2))
    ranks = Ranks.join(config)
    made = make_engine(model, weights, ranks, config)
    ids = torch.randint(3, 90, (2, 8))
    for _ in range(2):
        made.before_backward(is_last=True)
        made.backward(-made.forward(ids, torch.arange(14), torch.arange(14))[0].mean())
        assert made.optimizer_step(AdamParams(learning_rate=1e-2)) > 0
    after = {piece.name: piece.values.reshape(piece.shape).clone() for piece in made.pieces()}
    state = {piece.name for piece in made.state()}
    made.close()
    ranks.leave()
    assert after.keys() == before.keys()
    for name, weight in after.items():
        is_trained = name.startswith("model.layers.1.")
        assert torch.equal(weight, before[name]) is not is_trained, name
        assert (f"weights/{name}" in state) is is_trained


def test_a_reference_has_pieces_too(make_trainer: Make, weights_of: Callable[..., Any]) -> None:
    reference, policy = make_trainer(trainable=False), make_trainer()
    expected = weights_of(policy)
    ours = whole(reference, reference.engine.pieces())
    assert ours.keys() == expected.keys()
    assert all(torch.equal(ours[name], expected[name]) for name in expected)


def test_constant_is_constant() -> None:
    assert [learning_rate(OptimizerConfig(lr=2.0), step, 4) for step in (0, 3, 9)] == [2.0, 2.0, 2.0]


def test_warm_up_rises_linearly_and_skips_the_rate_zero() -> None:
    config = OptimizerConfig(lr=8.0, warmup_steps=4)
    assert [learning_rate(config, step, 100) for step in range(6)] == [2.0, 4.0, 6.0, 8.0, 8.0, 8.0]


def test_cosine_falls_from_the_peak_over_the_middle_to_the_floor() -> None:
    config = OptimizerConfig(lr=10.0, schedule="cosine", warmup_steps=2, min_lr_share=0.2)
    rates = [learning_rate(config, step, 12) for step in (2, 7, 12, 50)]
    assert rates == pytest.approx([10.0, 6.0, 2.0, 2.0])


def test_a_warm_up_longer_than_the_run_does_not_divide_by_zero() -> None:
    assert learning_rate(OptimizerConfig(lr=1.0, schedule="cosine", warmup_steps=5), 5, 5) == pytest.approx(1.0)

import inspect
import pickle
from functools import partial

import cloudpickle
import pytest
import torch

from penstock.algorithms.aggregation import BatchTotals
from penstock.algorithms.graph.dataflow import Dataflow
from penstock.algorithms.losses import policy_loss, sft_loss, with_entropy_bonus
from penstock.conf.errors import ConfigError

MASK = torch.tensor([[1, 1], [1, 0]])
LOGPROBS = torch.tensor([[-1.0, -2.0], [-3.0, float("nan")]])
ENTROPY = torch.tensor([[1.0, 2.0], [6.0, float("nan")]])


def call(loss, **arguments):
    return loss(logprobs=LOGPROBS, mask=MASK, totals=BatchTotals.of(MASK), **arguments)


def test_the_bonus_is_subtracted_and_its_gradient_raises_entropy():
    # 2 - 0.1 · (1 + 2 + 6) / 3
    entropy = ENTROPY.clone().requires_grad_()
    loss, metrics = call(with_entropy_bonus(sft_loss, 0.1), entropy=entropy)
    loss.backward()
    assert loss.item() == pytest.approx(2.0 - 0.3)
    assert metrics["entropy"].item() == 3.0
    assert not metrics["entropy"].requires_grad
    assert metrics["loss"].item() == 2.0
    torch.testing.assert_close(entropy.grad, torch.tensor([[-0.1, -0.1], [-0.1, 0.0]]) / 3)


def test_the_bonus_takes_the_aggregation_it_is_given():
    # sequence mean: ((1 + 2) / 2 + 6) / 2 = 3.75; constant: 9 / (2 · 3) = 1.5
    loss, metrics = call(with_entropy_bonus(sft_loss, 1.0, aggregation="sequence_mean"), entropy=ENTROPY)
    assert (loss.item(), metrics["entropy"].item()) == (2.0 - 3.75, 3.0)
    loss, _ = call(with_entropy_bonus(sft_loss, 1.0, aggregation="constant", constant=3.0), entropy=ENTROPY)
    assert loss.item() == 2.0 - 1.5


def test_the_signature_has_one_more_name_and_is_what_a_dataflow_reads():
    loss = with_entropy_bonus(partial(policy_loss, surrogate="gspo"), 0.1)
    names = list(inspect.signature(loss).parameters)
    assert names[:-1] == list(inspect.signature(policy_loss).parameters)
    assert names[-1] == "entropy"
    flow = Dataflow().rollout(samples_per_prompt=2).reward()
    flow.compute(torch.ones_like, per="group", reads=["reward"], writes=["advantage"]).train(loss=loss).check()
    assert flow.stage("train").reads == ("prompt_ids", "response_ids", "advantage", "behavior_logprobs")


def test_a_loss_that_knows_entropy_gets_it_too():
    def loss(logprobs, mask, totals, entropy, **others):
        return entropy[0, 0] * 1.0, {}

    bonus = with_entropy_bonus(loss, 0.0)
    assert list(inspect.signature(bonus).parameters) == ["logprobs", "mask", "totals", "entropy", "others"]
    assert call(bonus, entropy=ENTROPY)[0].item() == 1.0


def test_the_name_goes_before_open_keywords():
    bonus = with_entropy_bonus(lambda logprobs, mask, totals, **others: None, 0.1)
    assert list(inspect.signature(bonus).parameters) == ["logprobs", "mask", "totals", "entropy", "others"]


def test_it_has_the_name_of_its_loss():
    assert with_entropy_bonus(partial(policy_loss, kl_coef=0.0), 0.1).__name__ == "policy_loss"


@pytest.mark.parametrize("dumps", [pickle.dumps, cloudpickle.dumps])
def test_it_pickles(dumps):
    bonus = pickle.loads(dumps(with_entropy_bonus(partial(sft_loss, aggregation="sequence_mean"), 0.1)))
    assert list(inspect.signature(bonus).parameters)[-1] == "entropy"
    assert call(bonus, entropy=ENTROPY)[0].item() == pytest.approx(2.25 - 0.3)


def test_one_of_ones_own_pickles_by_value():
    bonus = cloudpickle.dumps(with_entropy_bonus(lambda logprobs, mask, totals: (logprobs[0, 0], {}), 0.1))
    assert call(pickle.loads(bonus), entropy=ENTROPY)[0].item() == pytest.approx(-1.3)


def test_bad_settings_are_named():
    with pytest.raises(ConfigError, match=r"algorithm.entropy_coef=-1"):
        with_entropy_bonus(sft_loss, -1)
    with pytest.raises(ConfigError, match=r"algorithm.aggregation=mean: unknown"):
        with_entropy_bonus(sft_loss, 1, aggregation="mean")
    with pytest.raises(ConfigError, match="constant=0"):
        with_entropy_bonus(sft_loss, 1, constant=0)

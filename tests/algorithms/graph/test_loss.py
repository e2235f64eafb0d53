import pickle
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.algorithms.aggregation import BatchTotals, aggregate
from penstock.algorithms.graph.columns import STANDARD_COLUMNS, Column
from penstock.algorithms.graph.dataflow import Dataflow
from penstock.algorithms.graph.loss import LossInputs, LossOutput, check_loss, wrap_loss
from penstock.algorithms.losses import ppo_clip_loss, with_entropy_bonus
from penstock.conf.errors import ConfigError, DataflowError, ShapeError

COLUMNS = STANDARD_COLUMNS | {"novelty": Column("novelty", "float32"), "kind": Column("kind", "string")}
MASK = torch.tensor([[1, 1, 1], [1, 0, 0]])
LOGPROBS = torch.tensor([[-1.0, -2.0, -3.0], [-4.0, torch.nan, torch.nan]])


def reinforce(inputs: LossInputs, *, scale: float = 1.0) -> torch.Tensor:
    return -scale * inputs.advantage * inputs.logprobs


def flow_with(loss, **settings):
    flow = Dataflow().rollout(samples_per_prompt=2).reward()
    return flow.compute(lambda reward: reward, reads=["reward"], writes=["advantage"], name="copy").train(
        loss=loss, **settings
    )


def call(loss, **columns):
    return loss(logprobs=LOGPROBS, mask=MASK, totals=BatchTotals.of(MASK), **columns)


def test_a_loss_with_inputs_reads_what_stages_write():
    flow = flow_with(partial(reinforce, scale=2.0)).check()
    train = flow.stage("train")
    assert train.reads == ("prompt_ids", "response_ids")
    assert flow.reads_of(train) == ("prompt_ids", "response_ids", "advantage", "behavior_logprobs")
    assert flow_with(lambda inputs, novelty: inputs.logprobs * novelty).stage("train").reads[2:] == ("novelty",)


@pytest.mark.parametrize(("aggregation", "by_hand"), [("token_mean", 1.5), ("sequence_mean", 1.0)])
def test_values_of_tokens_are_aggregated_as_the_dataflow_says(aggregation, by_hand):
    # values 2, 4, 6 and -4, that of padding ignored: 8 over 4 tokens; (4 - 4) / 2 sequences
    loss = wrap_loss(lambda inputs: reinforce(inputs) - torch.tensor([[0.0], [2.0]]), aggregation)
    advantage = torch.tensor([2.0, -0.5])
    value, metrics = call(loss, advantage=advantage)
    assert (value.item(), metrics) == ({"token_mean": 2.0, "sequence_mean": 0.0}[aggregation], {})
    by_name = wrap_loss(lambda logprobs, advantage: -advantage[:, None] * logprobs, aggregation)
    assert call(by_name, advantage=torch.tensor([1.0, 0.0]))[0].item() == by_hand


def test_metrics_of_tokens_are_token_means_without_gradient():
    loss = wrap_loss(lambda inputs: LossOutput(inputs.logprobs, {"log": inputs.logprobs}))
    logprobs = torch.tensor([[-1.0, -3.0]], requires_grad=True)
    value, metrics = loss(logprobs=logprobs, mask=torch.ones(1, 2), totals=BatchTotals(2, 1))
    assert value.requires_grad
    assert (metrics["log"].item(), metrics["log"].requires_grad) == (-2.0, False)


def test_a_mean_in_place_of_values_is_refused():
    with pytest.raises(ShapeError, match=r"the loss mean returned float32 \[\]; expected \[2, 3\].*Do not"):
        call(wrap_loss(named("mean", lambda inputs: inputs.logprobs.mean())))
    with pytest.raises(ShapeError, match="Do not take its mean"):
        call(wrap_loss(lambda inputs: LossOutput(inputs.logprobs, {"mean": inputs.logprobs.mean()})))


def named(name, function):
    function.__name__ = name
    return function


def test_an_input_that_no_stage_writes_is_named():
    with pytest.raises(DataflowError, match=r"inputs\.reference_logprobs, which no stage writes"):
        call(wrap_loss(lambda inputs: inputs.reference_logprobs))
    flow = flow_with(lambda inputs: inputs.reference_logprobs)
    with pytest.raises(DataflowError, match=r"inputs\.reference_logprobs"):
        check_loss(flow.stage("train").function, flow.columns)


def test_penstock_s_own_losses_stay_as_they_are():
    loss = partial(ppo_clip_loss, clip_high=0.28)
    assert wrap_loss(loss) is loss
    assert check_loss(loss, COLUMNS) == ""
    with pytest.raises(ConfigError, match="aggregation=mean"):
        flow_with(reinforce, aggregation="mean")


def test_a_loss_goes_to_other_processes_and_takes_an_entropy_bonus():
    loss = pickle.loads(pickle.dumps(wrap_loss(partial(reinforce, scale=2.0))))
    assert call(loss, advantage=torch.ones(2))[0].item() == 5.0
    with_bonus = with_entropy_bonus(reinforce, coef=0.5)
    value, metrics = call(with_bonus, advantage=torch.ones(2), entropy=torch.ones(2, 3))
    assert (value.item(), metrics["entropy"].item()) == (2.0, 1.0)


WRONG = {
    "a mean": lambda logprobs, advantage: (-(advantage[:, None] * logprobs)).mean(),
    "a sum": lambda logprobs, mask, advantage: (-(advantage[:, None] * logprobs)).sum() / mask.sum(),
    "rows": lambda logprobs, mask, totals: ((logprobs * mask).sum() / len(logprobs) / totals.num_tokens, {}),
    "padding": lambda logprobs, totals: (logprobs.sum() + logprobs.shape[1]) / totals.num_tokens,
    "a batch's mean": lambda inputs: (inputs.advantage - inputs.advantage.mean()) * inputs.logprobs,
}


@pytest.mark.parametrize("loss", WRONG.values(), ids=WRONG)
def test_a_loss_that_depends_on_how_batches_are_cut_is_found(loss):
    with pytest.raises(DataflowError, match=r"for a batch, .* for its two halves together and .* with more padding"):
        check_loss(wrap_loss(loss), COLUMNS)


RIGHT = {
    "values": reinforce,
    "contributions": lambda logprobs, mask, totals, advantage: (
        aggregate(-advantage[:, None] * logprobs, mask, totals, "sequence_mean"), {}
    ),
    "a sum": lambda logprobs, mask, totals: (logprobs * mask).sum() / totals.num_tokens,
    "whole groups": lambda inputs, group_ids, reward: inputs.logprobs * torch.stack(
        [reward[group_ids == group].mean() for group in group_ids]
    )[:, None],
    "scores": lambda scores, preferred, totals: (scores * preferred).sum() / totals.num_groups,
    "random": lambda inputs: inputs.logprobs * torch.rand(()),
    "texts": lambda inputs, kind: inputs.logprobs.mean(),
    "numbers that cannot be made up": lambda inputs, novelty: {}[float(novelty[0])],
}  # fmt: skip


@pytest.mark.parametrize("loss", RIGHT.values(), ids=RIGHT)
def test_other_losses_pass_the_trial(loss):
    check_loss(wrap_loss(loss), COLUMNS)


@given(st.integers(1, 3), st.integers(0, 3), st.sampled_from(["token_mean", "sequence_mean", "sequence_sum"]))
def test_an_aggregated_loss_is_the_same_however_a_batch_is_cut(cut, more, how):
    generator = torch.Generator().manual_seed(cut)
    mask = torch.arange(4) < torch.tensor([[4], [1], [0], [3]])
    columns = {"logprobs": -torch.rand(4, 4, generator=generator), "advantage": torch.randn(4, generator=generator)}
    loss, totals = wrap_loss(reinforce, how), BatchTotals.of(mask)

    def value(rows):
        padded = {name: torch.nn.functional.pad(one[rows], (0, more)) if one.dim() == 2 else one[rows]
                  for name, one in (columns | {"mask": mask}).items()}  # fmt: skip
        return loss(**padded, totals=totals)[0]

    whole = loss(**columns, mask=mask, totals=totals)[0]
    torch.testing.assert_close(value(slice(cut)) + value(slice(cut, None)), whole)

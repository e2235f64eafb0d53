import inspect
from functools import partial

import pytest

from penstock.algorithms.graph.columns import STANDARD_COLUMNS, Column, as_column
from penstock.algorithms.graph.dataflow import Dataflow
from penstock.algorithms.graph.stage import pair_responses
from penstock.conf.errors import DataflowError


def advantage(reward):
    return reward


def has_signal(**columns):
    return True


def novelty(response_ids):
    return response_ids


def loss(logprobs, mask, totals, advantage, reference_logprobs=None, *, clip=0.2):
    return logprobs, {}


def grpo_like(*, reads=("reward",), writes=("advantage",), per="group", train=loss):
    flow = Dataflow().rollout("policy", samples_per_prompt=4).reward()
    return flow.compute(advantage, per=per, reads=reads, writes=writes).train("policy", loss=train)


def test_a_complete_graph_passes_and_knows_its_columns():
    flow = grpo_like().check()
    assert [stage.name for stage in flow.stages] == ["source", "rollout", "reward", "advantage", "train"]
    assert flow.samples_per_prompt == 4
    assert flow.columns["advantage"] == STANDARD_COLUMNS["advantage"]
    assert [stage.kind for stage in flow.of_kind("compute")] == ["compute"]


def test_demonstrations_need_no_rollout():
    flow = Dataflow().demonstrations().train(loss=lambda logprobs, mask, totals: None).check()
    assert flow.stage("train").reads == ("prompt_ids", "response_ids")
    assert flow.samples_per_prompt == 1


def test_a_loss_reads_what_its_parameters_are_named():
    stage = grpo_like().stage("train")
    assert stage.reads == ("prompt_ids", "response_ids", "advantage")
    assert stage.optional_reads == ("reference_logprobs",)


def test_settings_bound_by_partial_are_no_columns():
    def with_settings(logprobs, mask, totals, advantage, *, beta, gamma, **more):
        return logprobs, {}

    flow = grpo_like(train=partial(with_settings, beta=0.1, gamma=None))
    assert flow.check().stage("train").reads == ("prompt_ids", "response_ids", "advantage")
    # a setting bound to None is optional; no stage writes a column of that name, so nothing is read
    assert flow.reads_of(flow.stage("train")) == ("prompt_ids", "response_ids", "advantage")


def test_an_optional_column_is_read_only_where_a_stage_writes_it():
    flow = grpo_like()
    assert "reference_logprobs" not in flow.reads_of(flow.stage("train"))
    flow.logprobs("reference").check()
    assert "reference_logprobs" in flow.reads_of(flow.stage("train"))


def test_logprobs_of_any_model_write_a_column_of_its_name():
    flow = Dataflow().rollout(samples_per_prompt=1).logprobs("teacher")
    assert flow.columns["teacher_logprobs"] == Column("teacher_logprobs", "float32", "token")


def test_a_new_column_is_declared_with_its_type():
    flow = Dataflow().rollout(samples_per_prompt=2).reward()
    flow.compute(novelty, per="sample", reads=["response_ids"], writes=[Column("novelty", "float32")])
    flow.train(loss=lambda logprobs, novelty: None).check()
    assert flow.stage("novelty").unit == "sample"


def test_a_compute_stage_is_named_after_its_function():
    flow = Dataflow().compute(partial(advantage), reads=["reward"], writes=["advantage"])
    assert flow.stages[0].name == "advantage"
    named = Dataflow().compute(advantage, reads=["reward"], writes=["advantage"], name="baseline")
    assert named.stages[0].name == "baseline"


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda: grpo_like(reads=["rewards"]).check(),
            r"stage 'advantage' reads column 'rewards', which no stage writes; did you mean 'reward'\?",
        ),
        (
            lambda: grpo_like(train=lambda logprobs, advantages: None).check(),
            r"stage 'train' reads column 'advantages'.*did you mean 'advantage'.*partial\(loss, setting=...\)",
        ),
        (
            lambda: grpo_like(writes=["advantag"]),
            r"writes column 'advantag', which is not standard.*mean .advantage.*Column\(.advantag., .float32.\)",
        ),
        (
            lambda: grpo_like(writes=["reward"]).check(),
            "column 'reward' is written by stage 'reward' and by 'advantage'; a column has one writer",
        ),
        (
            lambda: grpo_like(writes=[Column("mask", "float32")]).check(),
            "writes column 'mask', a name that the trainer gives to a loss itself",
        ),
        (
            lambda: grpo_like(per="groups").check(),
            r"stage 'advantage': per='groups' is unknown; did you mean 'group'\?",
        ),
        (
            lambda: grpo_like(per="batch").filter(has_signal, reads=["advantage"], reason="none").check(),
            "stage 'has_signal' reads column 'advantage', which stage 'advantage' writes per='batch'",
        ),
        (
            lambda: grpo_like().filter(has_signal, reads=["reward"], reason="none", per="batch").check(),
            "stage 'has_signal': a filter is per='group' or per='sample'",
        ),
        (
            lambda: grpo_like(reads=[]).check(),
            "stage 'advantage': a compute stage reads and writes at least one column",
        ),
        (
            lambda: grpo_like(writes=[]).check(),
            "stage 'advantage': a compute stage reads and writes at least one column",
        ),
        (
            lambda: grpo_like(writes=[Column("advantage", "float32", per_group=True)]).check(),
            "stage 'advantage': only the source writes columns that a group shares",
        ),
        (lambda: Dataflow().train(loss=loss).check(), "the dataflow has no rows: call flow.rollout"),
        (
            lambda: Dataflow().rollout(samples_per_prompt=2).check(),
            r"has 0 train stages; it needs exactly one flow.train",
        ),
        (lambda: grpo_like().reward(), "stage 'reward' is there twice; give the second one another name: name="),
        (lambda: grpo_like().demonstrations(), "stage 'source' is there twice; rows have one source: call one of"),
        (lambda: grpo_like().train(loss=loss), "policy 'policy' is there twice; add up the two losses in one"),
        (lambda: Dataflow().rollout(samples_per_prompt=0), "rollout: samples_per_prompt=0 must be at least 1"),
    ],
)
def test_a_graph_that_cannot_run_fails_by_the_name_of_its_stage_and_column(build, message):
    with pytest.raises(DataflowError, match=message):
        build()


CALLS = {
    "demonstrations": {}, "preferences": {}, "rollout": {"samples_per_prompt": 2}, "greedy_rollout": {}, "reward": {},
    "logprobs": {}, "scores": {}, "values": {}, "staleness": {},
    "train_critic": {"loss": loss}, "train": {"loss": loss},
    "compute": {"function": has_signal, "reads": ["reward"], "writes": ["advantage"]},
    "filter": {"function": has_signal, "reads": ["reward"], "reason": "none"},
}  # fmt: skip
"""Arguments with which each method of a graph adds a stage."""


@pytest.mark.parametrize("method", CALLS)
def test_what_is_advised_in_place_of_a_second_stage_can_be_done(method):
    add = getattr(Dataflow, method)
    flow = add(Dataflow(), **CALLS[method])
    with pytest.raises(DataflowError, match="is there twice; ") as refused:
        add(flow, **CALLS[method])
    advice, parameters = str(refused.value), inspect.signature(add).parameters
    assert ("name=" in advice) == ("name" in parameters)
    if "another model" in advice:
        add(flow, model="another", **CALLS[method])
    elif "name=" in advice:
        add(flow, name="another", **CALLS[method])
    else:
        assert "once" in advice


def test_a_circle_is_named_in_order():
    flow = grpo_like()
    flow.compute(advantage, name="a", reads=["b"], writes=[Column("a", "float32")])
    flow.compute(advantage, name="b", reads=["a"], writes=[Column("b", "float32")])
    with pytest.raises(DataflowError, match="in a circle: a → b → a"):
        flow.check()


def test_a_stage_that_reads_what_it_writes_is_a_circle():
    flow = grpo_like(reads=["advantage"])
    with pytest.raises(DataflowError, match="in a circle: advantage → advantage"):
        flow.check()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("x", "float16"), "dtype 'float16' is none of uint8, int32"),
        (("x", "int32", "group"), "shape 'group' is none of sample"),
    ],
)
def test_a_column_has_a_known_type(arguments, message):
    with pytest.raises(ValueError, match=message):
        Column(*arguments)


def test_as_column_takes_names_of_the_standard_schema():
    assert as_column("reward").dtype == "float32"
    with pytest.raises(KeyError, match="nonsense"):
        as_column("nonsense")


def test_training_waits_for_every_filter():
    flow = grpo_like().filter(has_signal, reads=["reward"], reason="no_signal").check()
    assert "has_signal_kept" in flow.reads_of(flow.stage("train"))
    assert flow.stage("has_signal").reason == "no_signal"


def test_what_is_per_batch_stays_in_the_trainers():
    flow = grpo_like(per="batch").check()
    assert [stage.name for stage in flow.in_trainer] == ["advantage"]
    assert "advantage" not in flow.stored_columns
    assert flow.batch_reads() == ("prompt_ids", "response_ids", "reward")


def test_a_state_is_carried_between_batches_alone():
    flow = Dataflow().rollout(samples_per_prompt=1).reward()
    flow.compute(advantage, reads=["reward"], writes=["advantage"], state=0).train(
        loss=lambda logprobs, advantage: None
    )
    with pytest.raises(
        DataflowError, match="stage 'advantage': a state is carried from batch to batch; set per='batch'"
    ):
        flow.check()


def test_staleness_is_known_to_the_trainers():
    flow = Dataflow().rollout(samples_per_prompt=1).staleness()
    flow.train(loss=lambda logprobs, staleness: None).check()
    assert [stage.name for stage in flow.in_trainer] == ["staleness"]
    assert flow.batch_reads() == ("prompt_ids", "response_ids", "token_versions")


def test_preferences_come_as_two_samples_of_a_group():
    flow = Dataflow().preferences().train(loss=lambda logprobs, preferred, group_ids: None).check()
    assert (flow.samples_per_prompt, flow.rows_are) == (2, "preferences")
    assert flow.stage("train").takes_groups
    assert flow.stage("train").reads == ("prompt_ids", "response_ids", "preferred")


def test_only_a_model_with_a_scalar_head_is_scored():
    flow = Dataflow().preferences().train("reward_model", loss=lambda scores, preferred, group_ids: None).check()
    assert flow.stage("train").is_scored
    flow = Dataflow().rollout(samples_per_prompt=1).scores().train(loss=lambda logprobs, reward: None).check()
    assert [stage.name for stage in flow.stages if stage.is_scored] == ["reward_model"]


def test_a_greedy_baseline_is_a_stage_like_others():
    flow = Dataflow().rollout(samples_per_prompt=1).greedy_rollout().reward()
    flow.reward(writes="greedy_reward", text="greedy_text", name="greedy_reward")
    assert flow.stage("greedy_reward").reads == ("task", "greedy_text")
    assert flow.rows_are == "prompts"


def test_the_chosen_response_is_the_first_sample_and_the_rejected_the_second():
    chosen, rejected = [7, 8, 9], [7, 0]
    responses, preferred = pair_responses([chosen, chosen], [rejected, rejected])
    assert responses == [chosen, rejected]
    assert preferred == [1.0, -1.0]

"""Several policies of one train stage: the graph, functions by policy, and what is refused."""

import pickle
from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.algorithms.advantages import group_advantage
from penstock.algorithms.catalogue import dataflow_of
from penstock.algorithms.graph.columns import Column
from penstock.algorithms.graph.dataflow import Dataflow
from penstock.algorithms.graph.describe import draw
from penstock.algorithms.graph.stage import ByPolicy, columns_read
from penstock.algorithms.losses import ppo_clip_loss
from penstock.conf.errors import ConfigError, DataflowError
from penstock.conf.run import RunConfig
from penstock.conf.trainer import PolicyConfig
from penstock.orchestrator.configuration.compose import load_config
from penstock.orchestrator.configuration.resolved import resolve, resolve_policies
from penstock.store.data.rows import Rows
from penstock.store.spec import StoreSpec
from penstock.workers.compute import ComputeWorker


def entropy_loss(entropy, mask, kept_share):
    return (entropy * mask).sum() * kept_share.mean(), {}


def centred(reward):
    return reward - reward.mean()


def halved(reward):
    return reward / 2


def two(function=group_advantage, **more) -> Dataflow:
    flow = Dataflow().rollout("solver", samples_per_prompt=3).reward()
    flow.compute(function, per="group", reads=["reward"], writes=["advantage"], name="compare", **more)
    return flow.train("solver", loss=ppo_clip_loss).train("proposer", loss=partial(ppo_clip_loss, clip_low=0.1))


@pytest.fixture
def config() -> RunConfig:
    return load_config([
        "environment.name=recipes/guess/game.py:Guess", "model.path=somewhere", "data.source=environment",
        "algorithm.name=grpo", "trainer.lora.rank=8", "trainer.lora.publish=adapter", "rollout.engine=hf",
    ])  # fmt: skip


def test_a_second_policy_extends_the_train_stage(config):
    flow = dataflow_of(config, two())
    (train,) = flow.of_kind("train")
    assert flow.policies == ("solver", "proposer")
    assert (train.model, train.function) == ("solver", train.policies[0].loss)
    assert len({policy.loss for policy in train.policies}) == 2
    assert {"advantage", "behavior_logprobs", "policy"} <= set(train.reads)
    assert flow.columns["policy"] in flow.stage("rollout").writes
    spec = StoreSpec.of(flow, config)
    assert [stage.name for stage in spec.stages if stage.unit == "batch"] == ["train"]
    assert (spec.group_size, flow.samples_per_prompt) == (6, 3)
    assert "solver, ppo_clip_loss; proposer, ppo_clip_loss" in draw(flow)


def test_what_any_of_the_losses_reads_is_read(config):
    flow = (
        Dataflow()
        .rollout(samples_per_prompt=2)
        .reward(writes=Column("kept_share", "float32"))
        .train("a", loss=entropy_loss)
    )
    flow.compute(centred, reads=["reward"], writes=["advantage"]).reward(name="second").train("b", loss=ppo_clip_loss)
    (train,) = flow.of_kind("train")
    assert {"kept_share", "advantage"} <= set(train.reads)


def test_one_policy_has_no_column_and_no_larger_groups(config):
    flow = Dataflow().rollout(samples_per_prompt=3).reward()
    flow.compute(group_advantage, reads=["reward"], writes=["advantage"]).train("solver", loss=ppo_clip_loss)
    flow = dataflow_of(config, flow)
    assert "policy" not in flow.columns
    assert (flow.rows_per_group, flow.policies) == (3, ("solver",))
    assert not isinstance(flow.stage("group_advantage").function, ByPolicy)


def test_a_function_compares_the_rows_of_each_policy(config):
    flow = dataflow_of(config, two(centred))
    worker = ComputeWorker(flow.stage("compare"), flow.columns)
    policy = ["solver", "solver", "proposer", "proposer"] * 2
    rows = Rows.from_lists(
        {"reward": [1.0, 3.0, 5.0, 6.0, 0.0, 0.0, 2.0, 4.0], "policy": policy}, group_ids=[7] * 4 + [8] * 4
    )
    assert worker.apply(rows)["advantage"] == pytest.approx([-1, 1, -0.5, 0.5, 0, 0, -1, 1])
    each = ByPolicy({"solver": centred, "proposer": halved})
    worker = ComputeWorker(replace(flow.stage("compare"), function=pickle.loads(pickle.dumps(each))), flow.columns)
    assert worker.apply(rows)["advantage"] == pytest.approx([-1, 1, 2.5, 3, 0, 0, 1, 2])


@given(st.lists(st.tuples(st.sampled_from("abc"), st.floats(-9, 9, width=32)), min_size=1, max_size=12))
def test_by_policy_is_the_function_of_each_part_in_the_order_of_the_rows(rows):
    names, values = [name for name, _ in rows], torch.tensor([value for _, value in rows])

    def function(reward, tokens, group_ids):
        return reward.cumsum(0), [one + len(reward) for one in tokens], bool(reward.sum() > 0)

    tokens = [torch.full((place % 3,), float(place)) for place in range(len(rows))]
    ids = torch.arange(len(rows))
    assert columns_read(ByPolicy(function)) == ["policy", "reward", "tokens"]
    sums, lists, kept = ByPolicy(function)(policy=names, reward=values, tokens=tokens, group_ids=ids)
    for name in set(names):
        places = [place for place, one in enumerate(names) if one == name]
        own = function(values[places], [tokens[place] for place in places], ids[places])
        assert torch.equal(sums[places], own[0])
        assert all(torch.equal(lists[place], one) for place, one in zip(places, own[1], strict=True))
        assert kept[places].tolist() == [own[2]] * len(places)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: two().train("solver", loss=ppo_clip_loss), "policy 'solver' is there twice; add up the two losses"),
        (lambda: two().train("reward", loss=ppo_clip_loss), "none of accuracy, actor"),
        (lambda: two().train("Judge 2", loss=ppo_clip_loss), "lower-case letters"),
        (lambda: two({"solver": centred, "propser": halved}), "'compare' has a function for policy 'propser'; did you"),
        (lambda: two({"solver": centred}), "'compare' has no function for policy 'proposer'"),
        (
            lambda: Dataflow(
                [replace(one, model="policy") if one.kind == "rollout" else one for one in two().stages], 3
            ),
            "it names the policy that answers a ctx.sample without policy=",
        ),
    ],
)
def test_what_cannot_be_done_by_policy_is_refused(build, message, config):
    with pytest.raises(DataflowError, match=message):
        dataflow_of(config, build())


def test_a_dataflow_of_several_policies_needs_an_environment():
    with pytest.raises(DataflowError, match="nothing says which of them speaks"):
        dataflow_of(load_config(["recipe=grpo", "model.path=somewhere"]), two())


def test_the_configuration_gets_the_policies_of_the_dataflow_in_its_order(config):
    config.trainer.policies = {"proposer": PolicyConfig(every=2, optimizer={"lr": 3e-4})}
    resolve_policies(config, dataflow_of(config, two()))
    assert list(config.trainer.policies) == ["solver", "proposer"]
    assert config.trainer.optimizer_of("proposer") == replace(config.trainer.optimizer, lr=3e-4)
    assert config.trainer.optimizer_of("solver") == config.trainer.optimizer


ADAPTERS = (
    "environment.name=recipes/guess/game.py:Guess", "model.path=somewhere", "data.source=environment",
    "algorithm.name=grpo", "trainer.lora.rank=8", "trainer.lora.publish=adapter", "rollout.engine=hf",
)  # fmt: skip


BEST = ("checkpoint.keep_best=1", "checkpoint.every_steps=5", "evaluation.every_steps=5")


def test_checkpoints_are_kept_by_the_reward_of_one_policy():
    best = "checkpoint.best_metric=proposer/heldout_reward/heldout"
    run = resolve(load_config([*ADAPTERS, *BEST, best]), two())
    names = run.config.evaluation.metrics(in_environment=True, policies=run.config.trainer.policies)
    assert names[2:] == ["solver/heldout_reward/heldout", "proposer/heldout_reward/heldout"]
    with pytest.raises(ConfigError, match="names no policy 'proposer' beside another"):
        resolve(load_config([*ADAPTERS, *BEST, best]))


def test_all_policies_have_the_same_ranks():
    run = resolve(load_config([*ADAPTERS, "trainer.num_ranks=2"]), two())
    assert [actor.name for actor in run.plan if actor.role == "trainer"] == ["Trainer-policies-0", "Trainer-policies-1"]


def test_the_only_policy_has_the_trainers_settings_alone():
    words = ["recipe=grpo", "model.path=somewhere"]
    assert resolve(load_config(words)).config.trainer.policies == {}
    with pytest.raises(ConfigError, match=r"trains one policy alone\. Set trainer\.optimizer"):
        resolve(load_config([*words, "trainer.policies.policy.every=2"]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["trainer.policies.judge.every=2"], "trainer.policies.judge: flow.train names no such policy"),
        (["trainer.policies.solver.optimizer={rate: 1}"], "trainer.policies.solver.optimizer.rate: unknown"),
        (["trainer.lora.publish=merged"], "trainer.lora.publish=merged: the dataflow trains solver and proposer"),
        (
            ["model.paths.solver=there"],
            "model.paths.solver: the dataflow trains solver and proposer, which are adapters",
        ),
        (["trainer.compile=true"], "trainer.compile=true: the dataflow trains"),
        (["trainer.policies.solver.num_ranks=1"], "trainer.policies.solver.num_ranks: .* are adapters"),
        (
            [*BEST, "checkpoint.best_metric=propser/heldout_reward/heldout"],
            "names no policy 'propser' beside another; did you mean 'proposer'",
        ),
        ([*BEST, "checkpoint.best_metric=proposer/accuracy/heldout"], "evaluation measures accuracy/heldout"),
    ],
)
def test_a_configuration_for_one_policy_alone_is_refused(change, message):
    with pytest.raises(ConfigError, match=message):
        resolve(load_config([*ADAPTERS, *change]), two())


MODELS = (
    "environment.name=recipes/guess/game.py:Guess", "model.path=somewhere", "data.source=environment",
    "algorithm.name=grpo", "rollout.engine=hf", "model.paths.proposer=elsewhere",
)  # fmt: skip


OWN_RANKS = ("trainer.policies.solver.num_ranks=2", "trainer.policies.proposer.num_ranks=1")


def test_engines_are_dealt_to_policies_that_are_whole_models():
    run = resolve(load_config([*MODELS, "rollout.num_workers=3"]), two())
    policies = {actor.name: actor.policy for actor in run.plan if actor.role == "rollout"}
    assert policies == {"Rollout-0": "solver", "Rollout-1": "proposer", "Rollout-2": "solver"}
    assert run.config.own_models("somewhere") == {"solver": "somewhere", "proposer": "elsewhere"}


def test_adapters_and_the_only_policy_have_all_engines():
    for words, flow in ((ADAPTERS, two()), (["recipe=grpo", "model.path=somewhere"], None)):
        run = resolve(load_config([*words, "rollout.num_workers=3"]), flow)
        assert {actor.policy for actor in run.plan} == {""}
        assert run.config.own_models("somewhere") == {}


def test_whole_models_are_not_evaluated_beside_training():
    words = ["max_staleness=2", "evaluation.every_steps=5", "rollout.num_workers=2"]
    assert resolve(load_config([*ADAPTERS, *words]), two()).config.evaluates_beside
    assert not resolve(load_config([*MODELS, *words]), two()).config.evaluates_beside


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            ["rollout.num_workers=1"],
            r"rollout.num_workers=1: .* each has engines of its own\. Set it to a number, 2 at",
        ),
        (["rollout.num_workers=auto"], "rollout.num_workers=auto: the dataflow trains solver and proposer"),
        (["evaluation.num_workers=1", "evaluation.every_steps=5"], "evaluation.num_workers=1: .* all engines evaluate"),
        (["trainer.engine=deepspeed"], "trainer.engine=deepspeed: .* set trainer.engine=fsdp"),
        (["rollout.max_pictures=1"], "rollout.max_pictures=1: .* they read text"),
        (["rollout.router_replay=true"], "rollout.router_replay=true: .* set it to false"),
        (["trainer.compile=true"], "trainer.compile=true: .* are whole models"),
        (["trainer.policies.solver.num_ranks=1"], r"\(solver 1, proposer 0\): proposer has none"),
        ([*OWN_RANKS, "trainer.num_ranks=2"], r"together 3, and trainer.num_ranks=2\. Set that to 3"),
        (
            [*OWN_RANKS, "trainer.num_ranks=3", "trainer.shard_size=3"],
            r"trainer.policies.solver.num_ranks=2: trainer.shard_size=3",
        ),
    ],
)
def test_what_whole_models_cannot_have_is_refused(change, message):
    with pytest.raises(ConfigError, match=message):
        resolve(load_config([*MODELS, "rollout.num_workers=2", *change]), two())


def test_ranks_of_their_own_train_no_critic():
    words = [*MODELS, "rollout.num_workers=2", *OWN_RANKS, "trainer.num_ranks=3"]
    assert resolve(load_config(words), two()).config.trainer.policy_ranks["proposer"] == range(2, 3)
    flow = two()
    flow.values()
    with pytest.raises(ConfigError, match="the critic is trained by all ranks"):
        resolve(load_config(words), flow)


def test_a_reference_for_models_that_start_apart_has_to_be_named():
    flow = two()
    flow.logprobs()
    with pytest.raises(ConfigError, match=r"model.reference_path=null: .* proposer of model\.paths"):
        resolve(load_config([*MODELS, "rollout.num_workers=2"]), flow)
    resolve(load_config([*MODELS, "rollout.num_workers=2", "model.reference_path=somewhere"]), flow)

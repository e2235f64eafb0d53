from dataclasses import replace

import pytest

from penstock.conf.algorithms import GrpoConfig
from penstock.conf.cluster import ClusterConfig
from penstock.conf.data import DataConfig, EvaluationConfig
from penstock.conf.errors import ConfigError
from penstock.conf.model import ModelConfig
from penstock.conf.rollout import RolloutConfig, SamplingConfig, SpeculationConfig
from penstock.conf.run import RunConfig, StoreConfig, validate
from penstock.conf.serve import ServeConfig
from penstock.conf.trainer import TrainerConfig
from penstock.conf.weights import WeightsConfig


def config(**sections):
    return RunConfig(algorithm=GrpoConfig(), **sections)


@pytest.mark.parametrize(
    ("max_staleness", "window", "groups_per_step", "window_staleness", "max_active_groups"),
    [
        # S = max_staleness - ceil((w - 1) / P); active = (S + 1) P
        (0, 1, 8, 0, 8),
        (1, 1, 8, 0, 16),
        (2, 1, 8, 0, 24),
        (1, 9, 8, 1, 8),  # ceil(8 / 8) = 1, S = 0
        (2, 2, 8, 1, 16),  # ceil(1 / 8) = 1, S = 1
        (2, 10, 8, 2, 8),  # ceil(9 / 8) = 2, S = 0
    ],
)
def test_admission_leaves_the_window_its_share_of_the_staleness(
    max_staleness, window, groups_per_step, window_staleness, max_active_groups
):
    run = config(
        max_staleness=max_staleness,
        store=StoreConfig(window=window),
        trainer=TrainerConfig(groups_per_step=groups_per_step),
    )
    validate(run)
    assert run.window_staleness == window_staleness
    assert run.max_active_groups == max_active_groups


def test_a_window_larger_than_the_staleness_allows_is_refused_with_both_keys():
    with pytest.raises(
        ConfigError, match=r"store.window=2 .* by 1 version.* max_staleness=0.* store.window=1 or raise"
    ):
        validate(config(store=StoreConfig(window=2)))


def test_a_response_must_leave_room_for_a_prompt():
    rollout = RolloutConfig(max_model_len=64, sampling=SamplingConfig(max_tokens=64))
    with pytest.raises(ConfigError, match=r"rollout.sampling.max_tokens=64 leaves no room .* rollout.max_model_len=64"):
        validate(config(rollout=rollout))


def test_held_out_problems_need_a_seed_of_their_own():
    data, evaluation = DataConfig(source="reasoning_gym", path="chain_sum", seed=5), EvaluationConfig(seed=5)
    with pytest.raises(ConfigError, match=r"evaluation.seed=5 equals data.seed"):
        validate(config(data=data, evaluation=evaluation))


def test_a_minibatch_needs_at_least_one_group():
    with pytest.raises(ConfigError, match=r"trainer.num_minibatches=9 exceeds trainer.groups_per_step=8"):
        validate(config(trainer=TrainerConfig(num_minibatches=9)))


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"placement": "colocated"}, "placement=colocated each engine"),
        ({"cluster": ClusterConfig(cpus_per_worker=0)}, "counts what engines reserve"),
    ],
)
def test_engines_following_the_cluster_need_own_devices_and_something_to_count(sections, message):
    with pytest.raises(ConfigError, match=message):
        validate(config(rollout=RolloutConfig(num_workers="auto"), **sections))


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        ({"engine": "vllm"}, r"on GPUs only, and rollout\.num_gpus_per_worker=0\. Set rollout\.engine=hf"),
        ({"engine": "scripted"}, r"rollout\.engine=scripted has no experts"),
    ],
)
def test_experts_of_an_engine_that_does_not_tell_them_are_not_replayed(engine, message):
    with pytest.raises(ConfigError, match=rf"rollout\.router_replay=true: .*{message}"):
        RolloutConfig(router_replay=True, **engine)
    assert RolloutConfig(router_replay=True, num_gpus_per_worker=1).router_replay


def test_an_update_mode_that_an_engine_lacks_is_refused_with_those_it_has() -> None:
    assert RolloutConfig().update_mode == "recompute"
    assert RolloutConfig(on_update="keep").update_mode == "keep"
    assert RolloutConfig(engine="hf").update_mode == RolloutConfig(engine="hf", on_update="keep").update_mode == "keep"
    message = r"on_update=recompute: .*engine=hf .* Set rollout\.on_update=keep, or rollout\.engine=vllm or scripted"
    with pytest.raises(ConfigError, match=message):
        RolloutConfig(engine="hf", on_update="recompute")
    with pytest.raises(ConfigError, match=r"rollout\.on_update=kept: unknown; did you mean 'keep'"):
        RolloutConfig(on_update="kept")


def test_engines_that_finish_their_sequences_first_are_several() -> None:
    finishing = RolloutConfig(on_update="finish")
    validate(config(rollout=finishing, max_staleness=0))  # nothing is under way when weights change
    validate(config(rollout=replace(finishing, num_workers=2), max_staleness=1))
    message = r"on_update=finish: .*num_workers=1 would stand still.*num_workers=2 or more, or rollout.on_update=recomp"
    with pytest.raises(ConfigError, match=message):
        validate(config(rollout=finishing, max_staleness=1))


@pytest.mark.parametrize("trainer", [{"compile": True}, {"sequence_parallel_size": 2, "num_ranks": 2}])
def test_experts_are_replayed_on_whole_rows_and_outside_of_compiled_layers(trainer):
    message = r"router_replay=true: .* Set trainer\.compile=false and trainer\.sequence_parallel_size=1"
    with pytest.raises(ConfigError, match=message):
        validate(config(rollout=RolloutConfig(engine="hf", router_replay=True), trainer=TrainerConfig(**trainer)))


@pytest.mark.parametrize(
    ("speculation", "rollout", "sections", "why"),
    [
        ({"method": "ngram"}, {"engine": "hf"}, {}, "only vLLM checks drafted tokens, and rollout.engine=hf"),
        ({"method": "draft"}, {}, {}, r"model\.paths\.draft is not set"),
        ({"method": "ngram"}, {"sampling": SamplingConfig(min_p=0.1)}, {}, r"rollout\.sampling\.min_p=0\.1"),
        ({"method": "ngram"}, {"sampling": SamplingConfig(top_k=5)}, {}, r"on a CPU .*rollout\.sampling\.top_k=5"),
        ({"method": "ngram"}, {"max_pictures": 2}, {}, r"rollout\.max_pictures=2"),
        ({"method": "ngram"}, {"router_replay": True, "num_gpus_per_worker": 1}, {}, r"rollout\.router_replay=true"),
        (
            {"method": "ngram"},
            {"engine_options": {"speculative_config": {}}, "num_gpus_per_worker": 1},
            {},
            "speculative_config is set as well",
        ),
        ({"method": "ngram"}, {"num_gpus_per_worker": 0.5}, {}, "begin again on a part of a GPU"),
        (
            {"method": "ngram"},
            {"num_gpus_per_worker": 1},
            {"trainer": TrainerConfig(num_gpus_per_rank=1), "weights": WeightsConfig(transport="nccl")},
            r"weights\.transport=nccl",
        ),
        ({"method": "ngram"}, {}, {"serve": ServeConfig(max_rank=8)}, "forgets the adapters of a server's clients"),
    ],
)
def test_drafts_that_cannot_be_checked_or_given_up_are_refused(speculation, rollout, sections, why):
    chosen = SpeculationConfig(**speculation)
    message = rf"rollout\.speculation\.method={chosen.method}: .*{why}.* rollout\.speculation\.method=none"
    with pytest.raises(ConfigError, match=message):
        validate(config(rollout=RolloutConfig(speculation=chosen, **rollout), **sections))
    validate(config(rollout=RolloutConfig(**rollout), **sections))


def test_drafts_of_a_named_model_are_taken():
    rollout = RolloutConfig(speculation=SpeculationConfig("draft"))
    validate(config(rollout=rollout, model=ModelConfig(paths={"draft": "a-model"})))


def test_a_number_of_engines_is_a_number_or_auto():
    assert RolloutConfig(num_workers="auto").least_workers == 1
    assert RolloutConfig(num_workers=3).least_workers == 3
    assert not RolloutConfig(num_workers=3).follows_cluster
    with pytest.raises(ConfigError, match=r"rollout.num_workers=atuo: unknown; did you mean 'auto'"):
        RolloutConfig(num_workers="atuo")


def test_only_a_number_of_engines_that_may_change_has_a_maximum():
    assert RolloutConfig(num_workers="auto", max_workers=4).max_workers == 4
    with pytest.raises(ConfigError, match=r"rollout.max_workers=4: rollout.num_workers=2 is a number that stays"):
        RolloutConfig(num_workers=2, max_workers=4)
    with pytest.raises(ConfigError, match=r"rollout.max_workers=0: must be at least 1"):
        RolloutConfig(num_workers="auto", max_workers=0)


def test_a_run_waits_for_no_negative_time():
    with pytest.raises(ConfigError, match=r"cluster.wait_s=-1: must be at least 0"):
        ClusterConfig(wait_s=-1)


def test_a_system_prompt_that_no_environment_would_read_is_refused():
    data = DataConfig(source="environment", system_prompt="Be short.")
    with pytest.raises(
        ConfigError, match=r"data\.system_prompt='Be short\.': with data\.source=environment nobody reads"
    ):
        validate(config(data=data))

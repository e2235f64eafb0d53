from dataclasses import dataclass

import pytest

from penstock.algorithms import catalogue, registry
from penstock.algorithms.catalogue import ALGORITHMS, build_dataflow, find_algorithm
from penstock.algorithms.registry import algorithm
from penstock.conf.algorithms import AlgorithmConfig, GrpoConfig, SftConfig
from penstock.conf.errors import ConfigError, DataflowError


@dataclass
class OwnConfig(AlgorithmConfig):
    name: str = "own"
    group_size: int = 3


@pytest.fixture(autouse=True)
def _own_registry(monkeypatch):
    own = {name: ALGORITHMS[name] for name in ("grpo", "sft")}
    for module in (registry, catalogue):
        monkeypatch.setattr(module, "ALGORITHMS", own)


def test_the_builtin_algorithms_are_there_with_their_configuration():
    assert find_algorithm("grpo").config_class is GrpoConfig
    assert find_algorithm("sft").config_class is SftConfig


def test_ones_own_algorithm_is_found_by_name_and_built_from_its_configuration():
    @algorithm("own")
    def own(cfg: OwnConfig):
        flow = registry.Dataflow().rollout(samples_per_prompt=cfg.group_size).reward()
        return flow.train(loss=lambda logprobs, mask, totals, reward: None)

    assert find_algorithm("own").build is own
    assert build_dataflow(OwnConfig()).samples_per_prompt == 3


def test_a_dataflow_is_checked_when_it_is_built():
    @algorithm("own")
    def own(cfg: OwnConfig):
        return registry.Dataflow().rollout(samples_per_prompt=cfg.group_size)

    with pytest.raises(DataflowError, match="0 train stages"):
        build_dataflow(OwnConfig())


def test_an_unknown_name_is_answered_with_the_nearest_one():
    with pytest.raises(ConfigError, match=r"algorithm=gpro: unknown; did you mean 'grpo'\? Known: grpo, sft"):
        find_algorithm("gpro")


def test_the_configuration_class_must_be_annotated():
    with pytest.raises(ConfigError, match="algorithm 'own': its function must take one parameter annotated"):

        @algorithm("own")
        def _without(cfg):
            return registry.Dataflow()

    with pytest.raises(ConfigError, match="derived from AlgorithmConfig"):

        @algorithm("own")
        def _of_another_type(cfg: dict):
            return registry.Dataflow()

    with pytest.raises(ConfigError, match="must take one parameter"):

        @algorithm("own")
        def _of_two(cfg: OwnConfig, more: int):
            return registry.Dataflow()


def test_grpo_reads_a_reference_only_with_a_kl_coefficient():
    plain, with_kl = build_dataflow(GrpoConfig()), build_dataflow(GrpoConfig(kl_coef=0.1))
    assert not plain.of_kind("logprobs")
    assert [stage.name for stage in with_kl.of_kind("logprobs")] == ["reference"]
    assert with_kl.reads_of(with_kl.stage("train"))[-1] == "reference_logprobs"


def test_grpo_binds_its_settings():
    cfg = GrpoConfig(group_size=5, normalize_std=False, clip_high=0.28, aggregation="sequence_mean", correction="none")
    flow = build_dataflow(cfg)
    assert flow.samples_per_prompt == 5
    assert flow.stage("group_advantage").function.keywords == {"normalize_std": False}
    assert flow.stage("train").function.keywords == {
        "clip_low": 0.2,
        "clip_high": 0.28,
        "kl_coef": 0.0,
        "aggregation": "sequence_mean",
        "correction": "none",
        "correction_cap": 2.0,
    }


def test_sft_trains_on_demonstrations():
    flow = build_dataflow(SftConfig(aggregation="sequence_mean"))
    assert [stage.name for stage in flow.stages] == ["source", "train"]
    assert flow.stage("train").function.keywords == {"aggregation": "sequence_mean"}

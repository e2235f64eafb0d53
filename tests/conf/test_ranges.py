import math

import pytest

from penstock.conf.algorithms import AlgorithmConfig, GrpoConfig, SftConfig
from penstock.conf.checks import above, at_least, one_of, within
from penstock.conf.cluster import ClusterConfig
from penstock.conf.data import DataConfig, EvaluationConfig
from penstock.conf.diagnosis import DiagnosisConfig
from penstock.conf.environment import EnvironmentConfig
from penstock.conf.errors import ConfigError, SamplingError
from penstock.conf.faults import FaultsConfig
from penstock.conf.model import FreshModelConfig, ModelConfig
from penstock.conf.reward import RewardConfig
from penstock.conf.rollout import RolloutConfig, SamplingConfig
from penstock.conf.run import RunConfig, StoreConfig, validate
from penstock.conf.serve import ServeConfig
from penstock.conf.tracking import TrackingConfig, WandbConfig
from penstock.conf.trainer import DeepSpeedConfig, LoraConfig, OptimizerConfig, TrainerConfig
from penstock.conf.weights import WeightsConfig
from penstock.workers.protocols import Sampling

OUT_OF_RANGE = [
    (RunConfig, "max_staleness", -1),
    (GrpoConfig, "algorithm.group_size", 0),
    (GrpoConfig, "algorithm.clip_low", -0.1),
    (GrpoConfig, "algorithm.clip_high", -0.1),
    (GrpoConfig, "algorithm.kl_coef", -1.0),
    (GrpoConfig, "algorithm.kl_coef", math.nan),
    (GrpoConfig, "algorithm.correction_cap", -1.0),
    (GrpoConfig, "algorithm.aggregation", "mean"),
    (GrpoConfig, "algorithm.aggregation", "constant"),
    (GrpoConfig, "algorithm.correction", "clipped"),
    (SftConfig, "algorithm.aggregation", "mean"),
    (ClusterConfig, "cluster.cpus_per_worker", -1.0),
    (ClusterConfig, "cluster.object_store_mib", 10),
    (ClusterConfig, "cluster.shutdown_timeout_s", 0.0),
    (ClusterConfig, "cluster.num_gpus", -1),
    (TrackingConfig, "tracking.samples_every_steps", -1),
    (TrackingConfig, "tracking.sinks", ["ray", "ray"]),
    (TrackingConfig, "tracking.close_timeout_s", 0.0),
    (WandbConfig, "tracking.wandb.mode", "on"),
    (DiagnosisConfig, "diagnosis.engine_share", 1.5),
    (DiagnosisConfig, "diagnosis.rank_slowdown", 0.5),
    (DiagnosisConfig, "diagnosis.padding_share", -0.1),
    (DiagnosisConfig, "diagnosis.filtered_share", 2.0),
    (DataConfig, "data.source", "json"),
    (DataConfig, "data.too_long", "cut"),
    (DataConfig, "data.max_prompt_tokens", 0),
    (DataConfig, "data.size", 0),
    (EvaluationConfig, "evaluation.every_steps", -1),
    (EvaluationConfig, "evaluation.num_problems", 0),
    (FreshModelConfig, "model.fresh.num_layers", 0),
    (FreshModelConfig, "model.fresh.max_position_embeddings", 8),
    (ModelConfig, "model.attention", "flash"),
    (RewardConfig, "reward.num_processes", 0),
    (RewardConfig, "reward.timeout_s", 0.0),
    (RewardConfig, "reward.max_error_share", 1.5),
    (RewardConfig, "reward.error_window", 0),
    (SamplingConfig, "rollout.sampling.temperature", 0.0),
    (SamplingConfig, "rollout.sampling.temperature", 0.005),
    (SamplingConfig, "rollout.sampling.top_p", 0.0),
    (SamplingConfig, "rollout.sampling.top_p", 1.1),
    (SamplingConfig, "rollout.sampling.top_k", -1),
    (SamplingConfig, "rollout.sampling.top_k", 2**31),
    (SamplingConfig, "rollout.sampling.min_p", 2.0),
    (SamplingConfig, "rollout.sampling.max_tokens", 0),
    (RolloutConfig, "rollout.engine", "vlm"),
    (RolloutConfig, "rollout.dtype", "float16"),
    (RolloutConfig, "rollout.num_workers", 0),
    (RolloutConfig, "rollout.num_gpus_per_worker", -1),
    (RolloutConfig, "rollout.max_model_len", 1),
    (RolloutConfig, "rollout.gpu_memory_utilization", 1.5),
    (WeightsConfig, "weights.phase_timeout_s", 0.0),
    (StoreConfig, "store.window", 0),
    (StoreConfig, "store.max_bytes", 0),
    (StoreConfig, "store.inline_bytes", -1),
    (StoreConfig, "store.lease_timeout_s", 0.0),
    (OptimizerConfig, "trainer.optimizer.lr", -1e-6),
    (OptimizerConfig, "trainer.optimizer.betas", [0.9]),
    (OptimizerConfig, "trainer.optimizer.betas", [0.9, 1.0]),
    (OptimizerConfig, "trainer.optimizer.eps", 0.0),
    (OptimizerConfig, "trainer.optimizer.eps", math.nan),
    (OptimizerConfig, "trainer.optimizer.weight_decay", -0.1),
    (TrainerConfig, "trainer.num_gpus_per_rank", -1),
    (TrainerConfig, "trainer.num_gpus_per_rank", 2),
    (TrainerConfig, "trainer.num_threads", -1),
    (RolloutConfig, "rollout.num_threads", -1),
    (ClusterConfig, "cluster.num_cpus", -1),
    (EnvironmentConfig, "environment.max_error_share", 2.0),
    (FreshModelConfig, "model.fresh.initializer_range", -0.1),
    (ServeConfig, "serve.port", 65536),
    (OptimizerConfig, "trainer.optimizer.clip_norm", -1.0),
    (OptimizerConfig, "trainer.optimizer.warmup_steps", -1),
    (OptimizerConfig, "trainer.optimizer.min_lr_share", 2.0),
    (OptimizerConfig, "trainer.optimizer.schedule", "linear"),
    (DeepSpeedConfig, "trainer.deepspeed.zero_stage", 0),
    (DeepSpeedConfig, "trainer.deepspeed.zero_stage", 4),
    (TrainerConfig, "trainer.engine", "ddp"),
    (TrainerConfig, "trainer.dtype", "float16"),
    (TrainerConfig, "trainer.num_ranks", 0),
    (TrainerConfig, "trainer.max_tokens_per_microbatch", 0),
    (TrainerConfig, "trainer.logprob_chunk_mib", 0),
    (TrainerConfig, "trainer.step_timeout_s", 0.0),
    (WeightsConfig, "weights.transport", "rdma"),
    (WeightsConfig, "weights.bucket_mib", 0),
    (FaultsConfig, "faults.max_restarts", -1),
    (FaultsConfig, "faults.window_s", 0.0),
    (FaultsConfig, "faults.pause_s", 61.0),
    (FaultsConfig, "faults.max_returns", -1),
    (FaultsConfig, "faults.heartbeat_s", 0.0),
    (FaultsConfig, "faults.heartbeat_timeout_s", 0.0),
    (FaultsConfig, "faults.stall_s", 0.0),
    (FaultsConfig, "faults.preemption_s", -1.0),
    (FaultsConfig, "faults.straggler_factor", 1.0),
]


@pytest.mark.parametrize(("config_class", "key", "value"), OUT_OF_RANGE, ids=lambda value: str(value)[:40])
def test_a_value_out_of_range_is_refused_by_its_full_key(config_class, key, value):
    field = key.rpartition(".")[2]
    with pytest.raises(ConfigError) as caught:
        config_class(**{field: value})
    assert str(caught.value).startswith(f"{key}={value}:")


def test_a_heartbeat_must_be_able_to_come_in_time():
    with pytest.raises(ConfigError, match=r"faults\.heartbeat_timeout_s=5: .* faults\.heartbeat_s=10 seconds"):
        FaultsConfig(heartbeat_timeout_s=5.0)


@pytest.mark.parametrize(
    ("stop", "said"), [(["\ud800"], "can be encoded"), ([""], "not empty"), ([5], "texts"), ("ab", "texts"),
                       ([f"stop {number}" for number in range(65)], "64 of them")],
)  # fmt: skip
def test_stop_strings_that_no_engine_can_take_are_refused_by_their_key(stop, said):
    """The configuration refuses what `Sampling` would refuse only within an actor."""
    with pytest.raises(ConfigError, match=rf"^rollout\.sampling\.stop=.*{said}"):
        SamplingConfig(stop=stop)
    with pytest.raises(SamplingError, match=rf"^stop=.*{said}"):
        Sampling(stop=tuple(stop) if isinstance(stop, list) else stop)


def test_the_widest_sampling_that_the_configuration_takes_is_taken_by_engines():
    config = SamplingConfig(top_k=2**31 - 1, stop=[f"stop {number}" for number in range(64)])
    assert Sampling.of(config).top_k == 2**31 - 1


def test_every_default_is_within_its_range():
    validate(RunConfig(algorithm=GrpoConfig()))


def test_what_hydra_has_not_resolved_yet_is_left_alone():
    at_least("key", "???", 1)
    above("key", "${seed}", 1)
    within("key", "???", 0, 1)
    one_of("key", "${model.name}", ["a"])


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (RunConfig(seed=2**63), rf"^seed={2**63}: must be a number of 64 bits"),
        (RunConfig(data=DataConfig(seed=-(2**64))), r"^data\.seed=-\d+: must be a number of 64 bits"),
        (RunConfig(trainer=TrainerConfig(optimizer=OptimizerConfig(lr=math.inf))), r"^trainer\.optimizer\.lr=inf: "),
        (RunConfig(algorithm=SftConfig(group_size=-1)), r"^algorithm\.group_size=-1: must be at least 1"),
    ],
)
def test_numbers_that_no_machine_has_are_refused_with_their_keys(config, message):
    with pytest.raises(ConfigError, match=message):
        validate(config)


def test_a_run_without_a_place_is_refused():
    with pytest.raises(ConfigError, match="output_dir=: names no place"):
        RunConfig(output_dir=" ")


def test_the_bounds_themselves_are_allowed():
    at_least("key", 1, 1)
    within("key", 0, 0, 1)
    within("key", 1, 0, 1)
    with pytest.raises(ConfigError, match="key=1: must be greater than 1"):
        above("key", 1, 1)


def test_an_algorithm_of_ones_own_need_not_check_anything():
    assert AlgorithmConfig().group_size == 1


@pytest.mark.parametrize(
    "options", [{"tensor_parallel_size": 2}, {"sequence_parallel_size": 2}, {"lora": LoraConfig(rank=4)}]
)
def test_what_only_fsdp_does_is_refused_with_deepspeed(options):
    with pytest.raises(ConfigError, match=r"is for trainer\.engine=fsdp only"):
        TrainerConfig(engine="deepspeed", num_ranks=2, **options)

"""The scoring of responses, and what happens when that fails."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from penstock.conf.capabilities import ROLLOUT_ENGINES
from penstock.conf.checks import POSITIVE, check_bounds, one_of
from penstock.conf.rollout import RolloutConfig

ENVIRONMENT_REWARD = "environment"
"""The function of `rewards` that stands for what the environment itself gives."""
JUDGE = "judge"
"""The function that has another model score."""


@dataclass
class WeightedRewardConfig:
    """A reward of several, whose weighted sum is trained on."""

    function: str = "math_verify"
    """Name of the function, as reward.function; or environment, for what the environment gives."""
    weight: float = 1.0
    """Factor that the reward is multiplied by; negative for a penalty."""
    options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the function."""
    name: str | None = None
    """Name of its metric, reward/NAME. `null`: the function's name."""

    @property
    def title(self) -> str:
        return re.sub(r"\W+", "_", self.name or self.function.rpartition(":")[2])

    @property
    def column(self) -> str:
        """Name of its column, and of the stage that writes it."""
        return f"reward_{self.title}"


@dataclass
class JudgeConfig:
    """The engine of a reward actor whose function is `judge`, where its options name no url. Its model is frozen:
    `model.paths.judge`, or the policy as it was at the start of the run. It has `reward.cpus_per_worker` threads."""

    engine: str = "vllm"
    """Name of the engine, vllm or hf; with hf set reward.options.structured=false."""
    num_gpus: float = 0
    """GPUs for each judge. 0: the CPU build."""
    dtype: str = "float32"
    """Data type, float32 or bfloat16. On GPUs use bfloat16."""
    max_model_len: int = 2048
    """Longest sequence: rubric, prompt, response and verdict, in tokens."""
    max_concurrent_samples: int = 256
    """Responses that one judge reads at a time."""
    kv_cache_gib: float = 0.5
    """Size of the KV cache on a CPU."""
    gpu_memory_utilization: float = 0.3
    """Share of a GPU's memory that vLLM takes."""
    engine_options: dict[str, Any] = field(default_factory=dict)
    """Further options of the engine, as rollout.engine_options."""

    def __post_init__(self) -> None:
        one_of("reward.judge.engine", self.engine, [name for name, one in ROLLOUT_ENGINES.items() if one.has_model])
        one_of("reward.judge.dtype", self.dtype, ("float32", "bfloat16"))
        check_bounds(
            self, "reward.judge",
            num_gpus=0, max_model_len=2, max_concurrent_samples=1, kv_cache_gib=POSITIVE,
            gpu_memory_utilization=(0.01, 1.0),
        )  # fmt: skip

    @property
    def rollout(self) -> RolloutConfig:
        """The engine's settings as those of an engine for rollouts. A schema alone lets a model write spaces without
        end."""
        options = {**(ROLLOUT_ENGINES[self.engine].structure_options or {}), **self.engine_options}
        return RolloutConfig(
            engine=self.engine, num_gpus_per_worker=self.num_gpus, dtype=self.dtype, max_model_len=self.max_model_len,
            max_concurrent_samples=self.max_concurrent_samples, kv_cache_gib=self.kv_cache_gib,
            gpu_memory_utilization=self.gpu_memory_utilization, engine_options=options,
        )  # fmt: skip


def has_own_judge(function: str, options: Mapping[str, Any]) -> bool:
    """Return whether a reward is given by a frozen model of the run."""
    return function == JUDGE and not options.get("url")


@dataclass
class RewardConfig:
    function: str = "math_verify"
    """Name of the function: a registered name (math_verify, reasoning_gym, python_tests, sql_result, judge, label,
    digits), `file.py:function`, or `package.module:function`. It gets the response without its thinking, unless its
    signature is TRL's or verl's; in an environment the last answer without its thinking."""
    options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the function."""
    with_thinking: bool | None = None
    """Whether the function gets the thinking before the answer. `null`: functions with TRL's or verl's signature get
    the whole response, all others what follows the thinking: nothing where that was cut off. true, false: all
    functions do, or none."""
    num_workers: int = 1
    """Reward actors of each reward stage, each with a pool of processes. On a cluster they are on the engines' nodes in
    turn, so as many as there are of these, or a multiple."""
    num_processes: int = 1
    """Processes of each actor's pool. A hanging reward holds one of them until its deadline."""
    cpus_per_worker: float = 1.0
    """Logical CPUs that each reward actor reserves for its processes. 0: none, as on a machine whose few cores are
    shared by all processes."""
    timeout_s: float = 10.0
    """Deadline of one sample's reward; then its process is killed and the sample dropped."""
    max_error_share: float = 0.2
    """Share of the last `error_window` rewards of an actor that may fail; the run ends when more do."""
    error_window: int = 100
    """Number of rewards over which the share is taken."""
    judge: JudgeConfig = field(default_factory=JudgeConfig)
    """Settings of the judge, with function=judge alone."""

    def __post_init__(self) -> None:
        check_bounds(
            self, "reward",
            num_workers=1, num_processes=1, cpus_per_worker=0, error_window=1, timeout_s=POSITIVE,
            max_error_share=(0, 1),
        )  # fmt: skip

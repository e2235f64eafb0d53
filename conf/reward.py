"""What scores a response, and what happens when that fails."""

import re
from dataclasses import dataclass, field
from typing import Any

from penstock.conf.checks import above, at_least, within

ENVIRONMENT_REWARD = "environment"
"""As a function of `rewards`: what the environment itself gives."""


@dataclass
class WeightedRewardConfig:
    """One of several rewards, whose weighted sum is trained on."""

    function: str = "math_verify"
    """As reward.function; or environment, for what the environment gives."""
    weight: float = 1.0
    """That it is multiplied by; negative for a penalty."""
    options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the function."""
    name: str | None = None
    """Of its metric, reward/NAME. `null`: the function's name."""

    @property
    def title(self) -> str:
        return re.sub(r"\W+", "_", self.name or self.function.rpartition(":")[2])


@dataclass
class RewardConfig:
    function: str = "math_verify"
    """A registered name (math_verify, reasoning_gym, python_tests, sql_result, judge, label, digits),
    `file.py:function`, or `package.module:function`."""
    options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the function."""
    num_workers: int = 1
    """Reward actors of each reward stage, each with a pool of processes. On a cluster they are on the engines' nodes in
    turn, so as many as there are of these, or a multiple."""
    num_processes: int = 1
    """Processes of each actor's pool. A hanging reward holds one of them until its deadline."""
    cpus_per_worker: float = 1.0
    """Logical CPUs that each reward actor reserves for its processes. 0: none, as on a machine whose few cores are
    shared by everybody."""
    timeout_s: float = 10.0
    """Deadline of one sample's reward; then its process is killed and the sample dropped."""
    max_error_share: float = 0.2
    """End the run when more than this share of the last `error_window` rewards of an actor failed."""
    error_window: int = 100
    """Rewards over which the share is taken."""

    def __post_init__(self) -> None:
        at_least("reward.num_workers", self.num_workers, 1)
        at_least("reward.num_processes", self.num_processes, 1)
        at_least("reward.cpus_per_worker", self.cpus_per_worker, 0)
        above("reward.timeout_s", self.timeout_s, 0)
        within("reward.max_error_share", self.max_error_share, 0, 1)
        at_least("reward.error_window", self.error_window, 1)

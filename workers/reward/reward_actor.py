"""`Reward-i`: the Ray shell around one pool of reward processes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from penstock.conf.reward import RewardConfig
from penstock.metering.ray_export import Origin, exported
from penstock.workers.reward.reward_pool import RewardPool
from penstock.workers.reward.reward_registry import RewardSpec
from penstock.workers.reward.reward_result import RewardResult, ScoringPool
from penstock.workers.reward.reward_worker import REWARD, RewardStage, RewardWorker
from penstock.workers.runtime.serving import Progress, ServingActor


@dataclass(frozen=True)
class RewardPlan:
    """The specification that a reward actor is made from."""

    name: str
    config: RewardConfig
    imports: tuple[str, ...] = ()
    function: Callable[..., Any] | None = None
    """The dataflow's own reward; None: the one that `reward.function` names."""
    stage: RewardStage = REWARD
    max_steps: int = 0
    """Steps of the run."""
    make_pool: Callable[[], ScoringPool] | None = None
    """Function that makes the pool that scores; None: processes with the function."""
    origin: Origin | None = None
    """Origin of its measurements; None: they are not exported."""


class Reward(ServingActor):
    """Lifecycle: that of every `ServingActor`; `score`, for evaluation, from `start` until `close`."""

    def __init__(self, plan: RewardPlan) -> None:
        super().__init__(plan.name, plan.config.judge.num_gpus if plan.make_pool is not None else 0)
        config = plan.config
        spec = RewardSpec.of(plan.function or config.function, config.options, plan.imports)
        spec = replace(spec, with_thinking=config.with_thinking, max_steps=plan.max_steps)
        pool = plan.make_pool() if plan.make_pool is not None else RewardPool.of(config, spec)
        self._worker = RewardWorker(
            pool, config, plan.stage, name=plan.name, meters=exported(plan.origin),
        )  # fmt: skip

    async def start(self) -> None:
        await self._worker.start()
        await super().start()

    async def score(self, tasks: Sequence[str], responses: Sequence[Any]) -> list[RewardResult]:
        """Score responses, each a `Response` or an environment's answer; `tasks` are the rows' `task` column (JSON)."""
        return await self._worker.score(tasks, responses)

    async def progress(self) -> Progress:
        """Samples scored, and those that are being scored. May be called at any time."""
        return self._phases.progress(self._worker.num_scored, self._worker.num_in_flight)

    async def close(self) -> None:
        await self._worker.close()

"""`Reward-i`: the Ray shell around one pool of reward processes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.conf.reward import RewardConfig
from penstock.metering.ray_export import Origin, exported
from penstock.workers.processes import ProcessId, register
from penstock.workers.progress import SERVING, Phases, Progress
from penstock.workers.reward.pool import RewardPool
from penstock.workers.reward.registry import RewardSpec
from penstock.workers.reward.result import RewardResult
from penstock.workers.reward.worker import Pool, RewardWorker
from penstock.workers.serving import Serving


@dataclass(frozen=True)
class RewardPlan:
    """The specification that a reward actor is made from."""

    name: str
    config: RewardConfig
    imports: tuple[str, ...] = ()
    function: Callable[..., Any] | None = None
    """The dataflow's own reward; None: the one that `reward.function` names."""
    stage: str = "reward"
    column: str = "reward"
    text: str = "response_text"
    """The column to score."""
    make_pool: Callable[[], Pool] | None = None
    """Function that makes the pool that scores; None: processes with the function."""
    origin: Origin | None = None
    """Origin of its measurements; None: they are not exported."""


class Reward:
    """Lifecycle: `start`, then `run` (for a store) and `score` (for evaluation) concurrently, then `close`. `run` with
    another store ends the previous one."""

    def __init__(self, plan: RewardPlan) -> None:
        config, self._phases = plan.config, Phases()
        spec = RewardSpec.of(plan.function or config.function, config.options, plan.imports)
        self._worker = RewardWorker(
            plan.make_pool() if plan.make_pool is not None else RewardPool.of(config, spec),
            config,
            name=plan.name,
            stage=plan.stage,
            column=plan.column,
            text=plan.text,
            meters=exported(plan.origin),
        )
        self._serving = Serving(self._worker.run)

    def __repr__(self) -> str:
        return self._worker.name

    async def start(self) -> None:
        await self._worker.start()
        self._phases.enter(SERVING)

    async def run(self, store: Any) -> None:
        await self._serving.run(store)

    async def drain(self, timeout_s: float) -> None:
        """Take no more samples and finish those that are here; what is not done after `timeout_s` goes back. Then `run`
        has returned."""
        await self._serving.drain(timeout_s)

    async def score(self, tasks: Sequence[str], responses: Sequence[str]) -> list[RewardResult]:
        """Score responses, a reward each; `tasks` are the rows' `task` column (JSON)."""
        return await self._worker.score(tasks, responses)

    async def process(self, stacks: str) -> ProcessId:
        """Return the identity of this process. From now on a signal writes its stacks below `stacks`."""
        return register(stacks)

    async def progress(self) -> Progress:
        """Samples scored, and those that are being scored. May be called at any time."""
        return self._phases.progress(self._worker.num_scored, self._worker.num_in_flight)

    async def stats(self) -> dict[str, float]:
        return self._worker.stats()

    async def close(self) -> None:
        await self._worker.close()

"""`Reward-i`: the Ray shell around one pool of reward processes. Started by `orchestrator/fleet.py`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.conf.reward import RewardConfig
from penstock.store.client import StoreClient
from penstock.workers.reward.pool import RewardError, RewardPool
from penstock.workers.reward.worker import RewardWorker


@dataclass(frozen=True)
class RewardSpec:
    name: str
    config: RewardConfig
    function: Callable[..., Any] | None = None
    """The dataflow's own reward; None: the one that `reward.function` names."""
    column: str = "reward"
    serves_stage: bool = True


class Reward:
    """Lifecycle: `start`, then `run` (for the store) and `score` (for evaluation) side by side, then `close`."""

    def __init__(self, spec: RewardSpec, store: Any | None) -> None:
        self._pool = RewardPool(spec.config, spec.function)
        client = StoreClient(store) if store is not None and spec.serves_stage else None
        self._worker = RewardWorker(self._pool, client, spec.name, spec.config, column=spec.column)

    async def start(self) -> None:
        await self._pool.start()

    async def run(self) -> None:
        await self._worker.run()

    async def score(self, tasks: Sequence[str], responses: Sequence[str]) -> list[float | RewardError]:
        """One reward a response; `tasks` are the rows' `task` column (JSON)."""
        return await self._worker.score(tasks, responses)

    async def stats(self) -> dict[str, float]:
        return self._worker.stats()

    async def close(self) -> None:
        await self._pool.close()

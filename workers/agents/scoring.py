"""The score of a final answer, by a reward function: named as `reward.function` names it, run in a process that can be
killed, so that a grader that hangs or crashes costs one attempt. For tasks that have a reference answer.
"""

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from penstock.conf.errors import DataError
from penstock.workers.reward.reward_pool import RewardPool
from penstock.workers.reward.reward_registry import RewardSpec
from penstock.workers.reward.reward_result import RewardError
from penstock.workers.reward.signatures import name_of
from penstock.workers.runtime.async_tasks import time_limit_paused
from penstock.workers.user_code import absolute

NUM_PROCESSES = 2
"""Number of processes. An answer takes milliseconds; a second process serves while the first hangs."""


class Scoring:
    """Lifecycle: the processes start with the first answer; `aclose` ends them, as does the end of this process.

    scoring = Scoring("math_verify")
    await scoring.score("It is 4.", {"answer": "4"})      # 1.0
    """

    def __init__(
        self,
        function: str | Callable[..., Any],
        options: Mapping[str, Any] | None = None,
        timeout_s: float = 10.0,
        *,
        files: Sequence[str] = (),
    ) -> None:
        """`files`: Python files that answers' classes are from. Raises `ConfigError` for a function that is not found
        or has a parameter that nothing provides."""
        spec = RewardSpec.of(function, dict(options or {}))
        spec = replace(spec, imports=tuple(absolute(file) for file in files))
        spec.check()
        self._function = function if isinstance(function, str) else name_of(function)
        self.pool = RewardPool(spec, num_processes=NUM_PROCESSES, timeout_s=timeout_s)
        self._starting: asyncio.Future[None] | None = None

    async def score(self, answer: Any, task: Mapping[str, Any]) -> float:
        """Score an answer. `answer`: text, or another type that the function takes. `task`: the row's columns. Raises
        `DataError` where the function raises, hangs or gives no number: the attempt has failed then, and is not trained
        as a wrong one. Waiting for a free process does not use the attempt's own time."""
        if self._starting is None:
            self._starting = asyncio.ensure_future(self.pool.start())
        with time_limit_paused():
            await asyncio.shield(self._starting)
        (found,) = await self.pool.score([answer], [json.dumps(dict(task), default=str)])
        if isinstance(found, RewardError):
            raise DataError(f"reward {self._function} cannot score this answer: {found.kind}: {found.text}")
        if found is None:
            raise DataError(f"reward {self._function} gives None: it does not count this answer.")
        return float(found)

    async def aclose(self) -> None:
        if self._starting is not None:
            await self.pool.close()

"""Attempts at adapters' tasks, with all that they have started ended."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.conf.environment import EnvironmentConfig
from penstock.workers.agents.environment import Task, make_environment
from penstock.workers.agents.trajectory import Trajectory
from penstock.workers.protocols import Sampling
from tests.workers.agents.played import Script, play


def adapter(name: str, **options: Any) -> Any:
    return make_environment(EnvironmentConfig(name=name, options=options))


def played(
    environment: Any, task: Task | Mapping[str, Any], script: Script | Sequence[str], **settings: Any
) -> tuple[Trajectory, Counter[str]]:
    """`task`: or its columns. `script`: or the answers in their order."""
    made = task if isinstance(task, Task) else Task("0", 0, task)
    if not callable(script):
        answers = iter(script)
        script = lambda prompt, sampling: next(answers)  # noqa: E731
    settings = {"max_tokens": 4000, "max_model_len": 4000, "sampling": Sampling(max_tokens=400, seed=5), **settings}
    return play(_Ended(environment), script, task=made, **settings)


def heard(attempt: Trajectory, role: str = "user") -> list[str]:
    """What the model was told."""
    return [str(message["content"]) for message in attempt.said if message["role"] == role]


class _Ended:
    def __init__(self, environment: Any) -> None:
        self._environment = environment

    async def run(self, task: Task, ctx: Any) -> None:
        try:
            await self._environment.run(task, ctx)
        finally:
            if hasattr(self._environment, "aclose"):
                await self._environment.aclose()

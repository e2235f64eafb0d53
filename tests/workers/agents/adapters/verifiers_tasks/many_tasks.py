"""A taskset of `verifiers` with more tasks than one would list, or without end."""

import itertools

import verifiers.v1 as vf

__all__ = ["Many"]


class ManyTask(vf.Task[vf.TaskData]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return 1.0


class ManyConfig(vf.TasksetConfig):
    kind: str = "large"


class Many(vf.Taskset[ManyTask, ManyConfig]):
    def __init__(self, config: ManyConfig) -> None:
        super().__init__(config)
        self.INFINITE = config.kind == "endless"

    def load(self):
        for number in itertools.count() if self.INFINITE else range(12_000):
            yield ManyTask(vf.TaskData(prompt=f"{number}?"), self.config.task)

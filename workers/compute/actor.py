"""`Compute-<stage>`: the Ray shell around a pure function of columns."""

from typing import Any

from penstock.algorithms.graph.columns import Column
from penstock.algorithms.graph.stage import Stage
from penstock.workers.compute.worker import ComputeWorker
from penstock.workers.processes import ProcessId, register
from penstock.workers.progress import SERVING, Phases, Progress
from penstock.workers.serving import Serving


class Compute:
    """Lifecycle: `run` until the store closes; with another store it ends the previous one. `columns`: every column of
    the dataflow, by name."""

    def __init__(self, name: str, stage: Stage, columns: dict[str, Column]) -> None:
        self._name, self._phases = name, Phases()
        self._worker = ComputeWorker(stage, columns, name=name, phases=self._phases)
        self._serving = Serving(self._worker.run)

    def __repr__(self) -> str:
        return self._name

    async def start(self) -> None:
        """Load nothing: there is the same call for every actor."""
        self._phases.enter(SERVING)

    async def run(self, store: Any) -> None:
        await self._serving.run(store)

    async def process(self, stacks: str) -> ProcessId:
        """Return the identity of this process. From now on a signal writes its stacks below `stacks`."""
        return register(stacks)

    async def progress(self) -> Progress:
        """Rows computed, and those that it holds. May be called at any time."""
        return self._phases.progress(self._worker.num_rows, self._worker.num_in_flight)

    async def stats(self) -> dict[str, float]:
        return self._worker.stats()

    async def close(self) -> None:
        """End nothing: there is the same call for every actor."""

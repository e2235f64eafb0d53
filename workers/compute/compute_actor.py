"""`Compute-<stage>`: the Ray shell around a pure function of columns."""

from penstock.algorithms.graph.columns import Column
from penstock.algorithms.graph.stage import Stage
from penstock.store.client.client import StoreClient
from penstock.workers.compute.compute_worker import ComputeWorker
from penstock.workers.lifecycle.progress import Progress
from penstock.workers.lifecycle.serving import ServingActor


class Compute(ServingActor):
    """Lifecycle: that of every `ServingActor`."""

    def __init__(self, name: str, stage: Stage, columns: dict[str, Column]) -> None:
        """`columns`: every column of the dataflow, by name."""
        super().__init__(name)
        self._worker = ComputeWorker(stage, columns, name=name, phases=self._phases)

    async def _serve(self, store: StoreClient) -> None:
        await self._worker.run(store)

    async def progress(self) -> Progress:
        """Rows computed, and those that it holds. May be called at any time."""
        return self._phases.progress(self._worker.num_rows, self._worker.num_in_flight)

    async def stats(self) -> dict[str, float]:
        return self._worker.stats()

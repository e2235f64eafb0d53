"""`Compute-<stage>`: the Ray shell around a pure function of columns. Started by `orchestrator/fleet.py`."""

from typing import Any

from penstock.algorithms.graph.columns import Column
from penstock.algorithms.graph.stage import Stage
from penstock.store.client.client import StoreClient
from penstock.workers.compute.worker import ComputeWorker


class Compute:
    """Lifecycle: `run` until the store closes. `columns`: every column of the dataflow, by name."""

    def __init__(self, name: str, stage: Stage, columns: dict[str, Column], store: Any) -> None:
        self._worker = ComputeWorker(stage, columns, StoreClient(store), name=name)

    async def start(self) -> None:
        """Nothing to load; the same call as for every other actor."""

    async def run(self) -> None:
        await self._worker.run()

    async def stats(self) -> dict[str, float]:
        return self._worker.stats()

    async def close(self) -> None:
        """Nothing to end; the same call as for every other actor."""

"""The vLLM engine with whole models by name, of which one is on the device at a time.

    sample ─▶ its weights are there? else wait for the samples under way, write them as a publication, and load that

Whoever comes waits for those who came before, so that two clients of different weights take turns. Weights that rest
are in the host's memory; the base model's are read from its files again.
"""

import asyncio
import itertools
import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from penstock.conf.errors import UnknownAdapter
from penstock.metering.meters import Meters
from penstock.workers.calls.training_calls import WHOLE, AdapterSpec, AdapterState
from penstock.workers.pictures.families import auto_class
from penstock.workers.protocols import EngineSpec, Publication
from penstock.workers.rollout.engine_vllm import VllmEngine
from penstock.workers.rollout.named_adapters import check_whole

SHARED_MEMORY = Path("/dev/shm")


class VllmWholeEngine(VllmEngine):
    """Lifecycle: that of a `VllmEngine`; `add_adapter` and `drop_adapter` at any time."""

    def __init__(self, spec: EngineSpec, meters: Meters | None = None) -> None:
        super().__init__(spec, meters)
        self._kept: dict[str, AdapterState] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._present: str | None = None
        """Name of the weights that vLLM has; None: the base model's."""
        self._numbers = itertools.count(spec.version + 1)
        self._turn = asyncio.Lock()
        self._num_uses = 0
        self._is_unused = asyncio.Event()
        self._is_unused.set()
        place = SHARED_MEMORY if SHARED_MEMORY.is_dir() else None
        self._root = tempfile.TemporaryDirectory(prefix="penstock-whole-", dir=place)

    async def add_adapter(self, name: str, state: AdapterState) -> None:
        self.check_alive()
        if name not in self._kept:
            check_whole(name, state, self._shapes)
            self._kept[name] = state.for_sampling()

    async def drop_adapter(self, name: str) -> None:
        self.check_alive()
        self._kept.pop(name, None)

    def adapters(self) -> list[str]:
        return list(self._kept)

    async def close(self) -> None:
        await super().close()
        self._root.cleanup()

    async def _create(self) -> None:
        self._shapes = await asyncio.to_thread(shapes_of, self._spec.model_path)
        await super()._create()

    @asynccontextmanager
    async def _adapter_in_use(self, name: str | None) -> AsyncIterator[Any]:
        async with self._turn:
            if name is not None and name not in self._kept:
                raise UnknownAdapter(f"weights {name!r}: the engine does not have them. Add them before you sample.")
            if name != self._present:
                await self._is_unused.wait()
                await self._bring(self._kept[name] if name is not None else None)
                self._present = name
            self._num_uses += 1
            self._is_unused.clear()
        try:
            yield None
        finally:
            self._num_uses -= 1
            if not self._num_uses:
                self._is_unused.set()

    async def _bring(self, state: AdapterState | None) -> None:
        """Load weights while nothing is sampled; None: the base model's. Raises what `load` raises."""
        if state is None:
            state = await asyncio.to_thread(base_of, self._spec.model_path)
        publication = await asyncio.to_thread(self._written, state, next(self._numbers))
        try:
            await self.load(publication)
        finally:
            await asyncio.to_thread(shutil.rmtree, publication.directory, ignore_errors=True)

    def _written(self, state: AdapterState, version: int) -> Publication:
        import torch

        from penstock.workers.weights.publication.layout import compute_layout
        from penstock.workers.weights.publication.publication import PublicationWriter, seal

        weights = state.weights()
        layout = compute_layout((name, values.shape, self._config.dtype) for name, values in weights.items())
        writer = PublicationWriter(self._root.name, version, layout)
        for name, values in weights.items():
            writer.write_elements(name, 0, torch.from_numpy(values).reshape(-1))
        writer.finish()
        return seal(self._root.name, version, layout)


def shapes_of(model_path: str) -> dict[str, tuple[int, ...]]:
    """Shapes of a model's parameters by their names, tied ones once; nothing of it is read but its configuration."""
    from penstock.workers.weights.stored import empty_model

    return {name: tuple(one.shape) for name, one in empty_model(model_path).named_parameters()}


def base_of(model_path: str) -> AdapterState:
    """The weights that a model's files have."""
    from transformers import AutoConfig

    kind = auto_class(AutoConfig.from_pretrained(model_path))
    lm = kind.from_pretrained(model_path, dtype="float32")
    weights = {f"weights/{name}": one.detach().numpy() for name, one in lm.named_parameters()}
    return AdapterState(AdapterSpec(WHOLE), weights)

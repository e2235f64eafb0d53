"""The vLLM engine where adapters are published: it keeps the base model and serves the newest adapter on top of it.

    load ─▶ open ▸ verify ▸ stage ▸ pause ▸ load ▸ finish ▸ version ▸ resume

vLLM knows one adapter, whose number never changes; a load replaces what it holds (vLLM's `load_inplace`). So the
sequences in flight, which name the adapter by that number, go on under the new one with their prefix recomputed, just
as they do when the whole model is exchanged, and the versions that vLLM reports for each token hold. Cached prefixes
are dropped by the pause. Before the first load A and B are zeros: the engine is the base model, and has shown that it
can serve such an adapter.
"""

import asyncio
import json
import shutil
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from penstock.conf.errors import ConfigError, WeightError
from penstock.conf.trainer import LoraConfig
from penstock.metering.meters import Meters
from penstock.workers.protocols import EngineSpec, Publication
from penstock.workers.rollout.engine_vllm import VllmEngine
from penstock.workers.rollout.vllm_conversion import Opened
from penstock.workers.weights.publication.adapter import (
    CONFIG_NAME,
    FILE_NAME,
    adapted_layers,
    layer_shapes,
    layout_of,
    peft_config,
)
from penstock.workers.weights.publication.layout import Layout
from penstock.workers.weights.publication.reading import MappedWeights, mapped_publication
from penstock.workers.weights.transport import Delivery, Info

NAME, NUMBER = "policy", 1
"""Name and number of the one adapter, for vLLM."""


class VllmAdapterEngine(VllmEngine):
    """Lifecycle and failures are those of `VllmEngine`; publications are of adapters of one kind."""

    def __init__(self, spec: EngineSpec, meters: Meters | None = None) -> None:
        """`spec`: with an adapter, the trainer's."""
        super().__init__(spec, meters)
        assert spec.adapter is not None
        self._adapter = spec.adapter
        self._folder = AdapterFolder(spec.adapter)
        self._layers: dict[str, tuple[int, int]] = {}
        """Shapes `(out, in)` of the layers that the adapter changes."""

    async def close(self) -> None:
        await super().close()
        self._folder.remove()

    async def _create(self) -> None:
        on_gpu = bool(self._config.num_gpus_per_worker)
        look = partial(adapted_layers, serves_mixtures=on_gpu)
        self._layers = await asyncio.to_thread(look, self._spec.model_path, self._adapter)
        self._folder.stage_zeros(self._version, layout_of(self._layers, self._adapter, self._config.dtype))
        await super()._create()
        call = self.llm.add_lora(self._lora_request())
        try:
            await self._in_time("adapter", call, self._config.start_timeout_s, "rollout.start_timeout_s")
        except WeightError as error:
            raise ConfigError(
                f"trainer.lora.publish=adapter: vLLM cannot serve one of trainer.lora.target_modules="
                f"{self._adapter.target_modules} with {self._spec.model_path}: {error} Name other layers, or set "
                "trainer.lora.publish=merged."
            ) from None

    def _lora_request(self) -> Any:
        return self._request_of(self._version)

    def _request_of(self, version: int, *, in_place: bool = False) -> Any:
        """A request for a version. Its path is part of vLLM's keys of cached prefixes, so the version is, too."""
        from vllm.lora.request import LoRARequest

        return LoRARequest(NAME, NUMBER, str(self._folder.of(version)), load_inplace=in_place)

    async def _open(self, publication: Publication) -> Opened:
        """Map, verify, check that the publication is an adapter of these layers (vLLM would take one of others, and
        leave out what it does not know), and put it where vLLM can read it."""
        mapped = await self._phase(publication, "open", asyncio.to_thread(mapped_publication, publication))
        await self._phase(publication, "verify", asyncio.to_thread(mapped.verify))
        if layer_shapes(mapped.manifest, self._adapter) != self._layers:
            raise WeightError(
                f"{mapped.manifest.file}: not an adapter of the layers {self._adapter.target_modules} of "
                f"{self._spec.model_path}, which the engine serves. Trainer and engines must have the same model.path "
                "and trainer.lora.target_modules."
            )
        await self._phase(publication, "stage", asyncio.to_thread(self._folder.stage, mapped))
        return Opened(mapped, {})

    async def _begin(self, delivery: Delivery) -> None:
        """Do nothing: vLLM checks the new adapter before it drops the old one."""

    async def _load_part(self, delivery: Delivery, info: Info) -> None:
        await self._phase(delivery, "load", self.llm.add_lora(self._request_of(delivery.version, in_place=True)))

    async def _finish(self, delivery: Delivery) -> None:
        await self._phase(delivery, "finish", self.llm.update_weight_version(str(delivery.version)))
        self._folder.keep_only(delivery.version)


class AdapterFolder:
    """Versions of the adapter as directories of PEFT's form, which vLLM reads.

    Copies, since files of publications are written again (`weights/publication/reused_files.py`), while vLLM may read
    an adapter whenever a request names it.
    """

    def __init__(self, config: LoraConfig) -> None:
        self._config = json.dumps(peft_config(config))
        self._root = tempfile.TemporaryDirectory(prefix="penstock-adapter-")

    def of(self, version: int) -> Path:
        return Path(self._root.name) / f"v{version:08d}"

    def stage(self, mapped: MappedWeights) -> None:
        """Write a publication's version; its bytes must have been verified."""
        mapped.copy_to(self._made(mapped.manifest.version) / FILE_NAME)

    def stage_zeros(self, version: int, layout: Layout) -> None:
        """Write a version that changes nothing."""
        with (self._made(version) / FILE_NAME).open("wb") as file:
            file.write(layout.header)
            file.truncate(layout.num_bytes)

    def keep_only(self, version: int) -> None:
        for path in Path(self._root.name).iterdir():
            if path != self.of(version):
                shutil.rmtree(path)

    def remove(self) -> None:
        self._root.cleanup()

    def _made(self, version: int) -> Path:
        path = self.of(version)
        path.mkdir(exist_ok=True)
        (path / CONFIG_NAME).write_text(self._config)
        return path

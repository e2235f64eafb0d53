"""The vLLM engines with adapters, by what is published to them and what clients ask for by name:

VllmAdapterEngine   publications are adapters: the base model with the newest one on top of it
VllmNamedEngine     publications are whole models; besides, many adapters by name are decoded together
VllmWholeEngine     publications are whole models; besides, whole models by name, one on the device at a time

`make` chooses among them and the engine without adapters.
"""

import asyncio
import itertools
import json
import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from penstock.conf.errors import ConfigError, DataError, DeadlineExceeded, UnknownAdapter, WeightError, WorkerDied
from penstock.conf.trainer import LoraConfig
from penstock.metering.meters import Meters
from penstock.workers.pictures.processor import auto_class
from penstock.workers.protocols import WHOLE, AdapterLimits, AdapterSpec, AdapterState, EngineSpec, Publication
from penstock.workers.rollout.engine_vllm import LORA_RANKS, START_KEY, VllmEngine
from penstock.workers.rollout.named_adapters import Shape, check_adapter, check_whole, write_peft
from penstock.workers.runtime.async_tasks import cancel_all
from penstock.workers.weights.engine_calls import Delivery, Info
from penstock.workers.weights.publication.adapter import (
    CONFIG_NAME,
    FILE_NAME,
    adapted_layers,
    adapter_layout,
    adapter_tensors,
    layer_shapes,
    peft_config,
    tensor_name,
)
from penstock.workers.weights.publication.layout import Layout, compute_layout
from penstock.workers.weights.publication.publication_files import MappedWeights

NAME = "policy"
"""Name of the only published adapter, for vLLM; of several policies each has its own."""
ADAPTED_HEADS = ("Qwen2ForCausalLM", "Qwen3ForCausalLM", "LlamaForCausalLM", "MistralForCausalLM")
"""Models whose output layer may have an adapter (`vllm_heads.py`)."""
LARGEST_VOCABULARY = 258_048
"""Largest vocabulary of an output layer that vLLM takes an adapter of."""
KEPT_S = 60.0
"""Seconds that the files of a dropped adapter stay, for a step that vLLM has planned already."""
SHARED_MEMORY = Path("/dev/shm")


def make(spec: EngineSpec, meters: Meters | None = None) -> VllmEngine:
    """Make the engine for what is published and served. `meters`: for vLLM's own statistics."""
    if spec.adapters is not None:
        return (VllmWholeEngine if spec.adapters.max_rank == WHOLE else VllmNamedEngine)(spec, meters)
    return (VllmEngine if spec.adapter is None else VllmAdapterEngine)(spec, meters)


class VllmAdapterEngine(VllmEngine):
    """The engine where adapters are published: it keeps the base model and serves the newest adapter on top of it.
    Lifecycle and failures are those of `VllmEngine`; publications are of adapters of one kind.

        load ─▶ open ▸ verify ▸ stage ▸ pause ▸ load ▸ finish ▸ version ▸ resume

    vLLM knows one adapter, or one of each policy, whose number never changes; a load replaces its weights (vLLM's
    `load_inplace`). So the sequences in flight, which name the adapter by that number, continue under the new one with
    their prefix recomputed, just as they do when the whole model is exchanged, and the versions that vLLM reports for
    each token hold. Cached prefixes are dropped by the pause. Before the first load A and B are zeros: the engine is
    the base model, and has shown that it can serve such an adapter.
    """

    def __init__(self, spec: EngineSpec, meters: Meters | None = None) -> None:
        """`spec`: with an adapter, the trainer's."""
        super().__init__(spec, meters)
        assert spec.adapter is not None
        self._adapter = spec.adapter
        self._folder = AdapterFolder(spec.adapter)
        self._layers: dict[str, Shape] = {}
        """Shapes `(out, in)` of the layers that the adapter changes."""

    async def close(self) -> None:
        await super().close()
        self._folder.remove()

    async def _create(self) -> None:
        look = partial(adapted_layers, serves_mixtures=bool(self._config.num_gpus_per_worker))
        self._layers = await asyncio.to_thread(look, self._spec.model_path, self._adapter)
        layout = adapter_layout(self._layers, self._adapter, self._config.dtype)
        for policy in self._policies:
            self._folder.stage_zeros(self._version, layout, policy)
        await super()._create()
        try:
            for policy in self._policies:
                call = self.llm.add_lora(self._lora_request(policy))
                await self._in_time("adapter", call, self._config.start_timeout_s, START_KEY)
        except WeightError as error:
            raise ConfigError(
                f"trainer.lora.publish=adapter: vLLM cannot serve one of trainer.lora.target_modules="
                f"{self._adapter.target_modules} with {self._spec.model_path}: {error} Name other layers, or set "
                "trainer.lora.publish=merged."
            ) from None

    @property
    def _policies(self) -> tuple[str, ...]:
        return self._spec.policies or ("",)

    def _lora_request(self, policy: str = "") -> Any:
        self._spec.check_policy(policy)
        return self._request_of(self._version, policy)

    def _request_of(self, version: int, policy: str, *, in_place: bool = False) -> Any:
        """A request for a version. Its path is part of vLLM's keys of cached prefixes, so the version is, too."""
        from vllm.lora.request import LoRARequest

        number, place = 1 + self._policies.index(policy), self._folder.of(version, policy)
        return LoRARequest(policy or NAME, number, str(place), load_inplace=in_place)

    async def _open(self, publication: Publication) -> MappedWeights:
        """Map, verify, check that the publication is an adapter of these layers (vLLM would take an adapter of
        other layers, and leave out what it does not know), and put it where vLLM can read it."""
        mapped = await self._phase(publication, "open", asyncio.to_thread(MappedWeights, publication))
        await self._phase(publication, "verify", asyncio.to_thread(mapped.verify))
        if layer_shapes(mapped.manifest, self._adapter, self._spec.policies) != self._layers:
            raise WeightError(
                f"{mapped.manifest.file}: not an adapter of the layers {self._adapter.target_modules} of "
                f"{self._spec.model_path}, which the engine serves. Trainer and engines must have the same model.path "
                "and trainer.lora.target_modules."
            )
        for policy in self._policies:
            await self._phase(publication, "stage", asyncio.to_thread(self._folder.stage, mapped, policy))
        return mapped

    async def _begin(self, delivery: Delivery) -> None:
        """Do nothing: vLLM checks the new adapter before it drops the old one."""

    async def _load_part(self, delivery: Delivery, info: Info) -> None:
        for policy in self._policies:
            request = self._request_of(delivery.version, policy, in_place=True)
            await self._phase(delivery, "load", self.llm.add_lora(request))

    async def _finish(self, delivery: Delivery) -> None:
        await self._phase(delivery, "finish", self.llm.update_weight_version(str(delivery.version)))
        self._folder.keep_only(delivery.version)


class AdapterFolder:
    """Versions of the adapter as directories of PEFT's form, which vLLM reads; of several policies with one for each
    in them.

    Copies, since files of publications are written again (`publication_files.py`), while vLLM may read
    an adapter whenever a request names it.
    """

    def __init__(self, config: LoraConfig) -> None:
        self._config = json.dumps(peft_config(config))
        self._root = tempfile.TemporaryDirectory(prefix="penstock-adapter-")

    def of(self, version: int, policy: str = "") -> Path:
        return Path(self._root.name) / f"v{version:08d}" / policy

    def stage(self, mapped: MappedWeights, policy: str = "") -> None:
        """Write a publication's version; its bytes must have been verified."""
        file = self._new(mapped.manifest.version, policy) / FILE_NAME
        if not policy:
            mapped.copy_to(file)
            return
        from safetensors.torch import save_file

        save_file({name: mapped.tensor(key) for name, key in adapter_tensors(mapped, policy).items()}, file)

    def stage_zeros(self, version: int, layout: Layout, policy: str = "") -> None:
        """Write a version that changes nothing."""
        with (self._new(version, policy) / FILE_NAME).open("wb") as file:
            file.write(layout.header)
            file.truncate(layout.num_bytes)

    def keep_only(self, version: int) -> None:
        for path in Path(self._root.name).iterdir():
            if path != self.of(version):
                shutil.rmtree(path)

    def remove(self) -> None:
        self._root.cleanup()

    def _new(self, version: int, policy: str) -> Path:
        path = self.of(version, policy)
        path.mkdir(parents=True, exist_ok=True)
        (path / CONFIG_NAME).write_text(self._config)
        return path


@dataclass
class NamedAdapter:
    """An adapter that vLLM knows."""

    request: Any
    """vLLM's `LoRARequest`."""
    num_uses: int = 0
    """Requests in flight."""
    is_dropped: bool = False


class VllmNamedEngine(VllmEngine):
    """The engine with many adapters by name (vLLM's multi-LoRA): requests of several of them are decoded together.
    Lifecycle and failures are those of `VllmEngine`; `generate` and `load` are of the base model.

        add_adapter ─▶ checked ▸ written as PEFT's files ▸ loaded, so that what vLLM cannot serve is refused here
        sample      ─▶ a request that names the adapter's number and directory
        drop        ─▶ unknown at once; forgotten by vLLM when its last request has ended

    vLLM keeps `max_loaded` of them. It drops the one that was asked for least recently, and reads it again from its
    directory when a request names it. Each adapter has a number and a directory of its own, never used again: they are
    part of vLLM's keys of cached prefixes.

    vLLM's CPU kernels take "no adapter", which is number -1, for the last place: where something is loaded there,
    requests of the base model would get it. On a CPU these name an adapter of zeros, and so are the base model's to the
    bit.
    """

    def __init__(self, spec: EngineSpec, meters: Meters | None = None) -> None:
        """`spec`: with room for adapters."""
        super().__init__(spec, meters)
        assert spec.adapters is not None
        assert spec.adapter is None
        self._limits = spec.adapters
        self._root = tempfile.TemporaryDirectory(prefix="penstock-adapters-")
        self._numbers = itertools.count(1)
        self._shapes: dict[str, Shape] = {}
        """Shapes `(out, in)` of the layers that may have an adapter."""
        self._base: Any = None
        """vLLM's request for the adapter of zeros; None: it needs none."""
        self._named: dict[str, NamedAdapter] = {}
        self._adding = asyncio.Lock()
        self._forgetting: set[asyncio.Task[None]] = set()

    async def add_adapter(self, name: str, state: AdapterState) -> None:
        self.check_alive()
        async with self._adding:
            if name not in self._named:
                await asyncio.to_thread(check_adapter, name, state, self._shapes.get, self._limits)
                self._named[name] = NamedAdapter(await self._load_adapter(name, state))

    async def drop_adapter(self, name: str) -> None:
        self.check_alive()
        async with self._adding:
            adapter = self._named.pop(name, None)
            if adapter is not None:
                adapter.is_dropped = True
                await self._forget_unused(adapter)

    def adapters(self) -> list[str]:
        return list(self._named)

    async def close(self) -> None:
        await cancel_all(self._forgetting)
        await super().close()
        self._root.cleanup()

    async def _create(self) -> None:
        on_gpu = bool(self._config.num_gpus_per_worker)
        self._shapes = await asyncio.to_thread(servable_layers, self._spec.model_path, self._limits, on_gpu)
        await super()._create()
        if not on_gpu:
            self._base = await self._load_adapter("base", zeros(self._shapes))

    def _lora_request(self, policy: str = "") -> Any:
        return self._base

    @asynccontextmanager
    async def _adapter_in_use(self, name: str | None, policy: str = "") -> AsyncIterator[Any]:
        if name is None:
            yield self._base
            return
        if name not in self._named:
            raise UnknownAdapter(f"adapter {name!r}: the engine does not have it. Add it before you sample from it.")
        adapter = self._named[name]
        adapter.num_uses += 1
        try:
            yield adapter.request
        finally:
            adapter.num_uses -= 1
            if adapter.is_dropped and not adapter.num_uses and self._broken is None and self.llm is not None:
                task = asyncio.create_task(self._forget_unused(adapter))
                self._forgetting.add(task)
                task.add_done_callback(self._forgetting.discard)

    async def _load_adapter(self, name: str, state: AdapterState) -> Any:
        """Write an adapter, have vLLM load it, and return vLLM's request for it. Raises `DataError` where vLLM cannot
        serve it."""
        from vllm.lora.request import LoRARequest

        number = next(self._numbers)
        directory = Path(self._root.name) / str(number)
        await asyncio.to_thread(write_peft, directory, state)
        request = LoRARequest(str(number), number, str(directory))
        try:
            await self._call(f"loading adapter {name!r}", self.llm.add_lora(request))
        except WeightError as error:
            shutil.rmtree(directory)
            raise DataError(f"adapter {name!r}: vLLM cannot serve it: {error}") from None
        return request

    async def _forget_unused(self, adapter: NamedAdapter) -> None:
        if adapter.num_uses:
            return
        with suppress(DeadlineExceeded, WeightError, WorkerDied):  # vLLM drops it by itself when it needs the place
            await self._call("dropping an adapter", self.llm.remove_lora(adapter.request.lora_int_id))
        remove = partial(shutil.rmtree, adapter.request.lora_path, ignore_errors=True)
        asyncio.get_running_loop().call_later(KEPT_S, remove)


def servable_layers(model_path: str, limits: AdapterLimits, on_gpu: bool) -> dict[str, Shape]:
    """Shapes `(out, in)` of the layers of a model on disk whose adapters vLLM serves. Raises `ConfigError`."""
    from transformers import AutoConfig

    if limits.max_rank > max(LORA_RANKS):
        raise ConfigError(f"serve.max_rank={limits.max_rank}: vLLM serves adapters up to {max(LORA_RANKS)}.")
    shapes = adapted_layers(model_path, LoraConfig(), serves_mixtures=on_gpu)
    if not limits.head:
        return shapes
    config = AutoConfig.from_pretrained(model_path)
    text, name = config.get_text_config(), (config.architectures or ["?"])[0]
    if name not in ADAPTED_HEADS or text.vocab_size > LARGEST_VOCABULARY:
        raise ConfigError(
            f"model.path={model_path}: vLLM serves no adapter of the output layer of {name} with a vocabulary of "
            f"{text.vocab_size}; it does for {', '.join(ADAPTED_HEADS)} up to {LARGEST_VOCABULARY}. "
            "Set rollout.engine=hf, or serve adapters without it (train_unembed=False)."
        )
    return shapes | {"lm_head": (text.vocab_size, text.hidden_size)}


def zeros(shapes: dict[str, Shape]) -> AdapterState:
    """An adapter of rank 1 that changes nothing."""
    tensors = {}
    for layer, (num_out, num_in) in shapes.items():
        tensors[f"weights/{tensor_name(layer, 'A')}"] = np.zeros((1, num_in), np.float32)
        tensors[f"weights/{tensor_name(layer, 'B')}"] = np.zeros((num_out, 1), np.float32)
    return AdapterState(AdapterSpec(1), tensors)


class VllmWholeEngine(VllmEngine):
    """The engine with whole models by name, of which one is on the device at a time. Lifecycle: that of a `VllmEngine`;
    `add_adapter` and `drop_adapter` at any time.

        sample ─▶ its weights are there? else wait for the samples under way, write them as a publication, and load that

    A caller waits for earlier ones, so that two clients of different weights take turns. Unused weights are in the
    host's memory; the base model's are read from its files again.
    """

    def __init__(self, spec: EngineSpec, meters: Meters | None = None) -> None:
        super().__init__(spec, meters)
        self._states: dict[str, AdapterState] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        """Shapes of the model's parameters, tied ones once."""
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
        if name not in self._states:
            check_whole(name, state, self._shapes)
            self._states[name] = state.for_sampling()

    async def drop_adapter(self, name: str) -> None:
        self.check_alive()
        self._states.pop(name, None)

    def adapters(self) -> list[str]:
        return list(self._states)

    async def close(self) -> None:
        await super().close()
        self._root.cleanup()

    async def _create(self) -> None:
        from penstock.workers.weights.checkpoint_form import empty_model

        lm = await asyncio.to_thread(empty_model, self._spec.model_path)
        self._shapes = {name: tuple(parameter.shape) for name, parameter in lm.named_parameters()}
        await super()._create()

    @asynccontextmanager
    async def _adapter_in_use(self, name: str | None, policy: str = "") -> AsyncIterator[Any]:
        async with self._turn:
            if name is not None and name not in self._states:
                raise UnknownAdapter(f"weights {name!r}: the engine does not have them. Add them before you sample.")
            if name != self._present:
                await self._is_unused.wait()
                await self._load_state(self._states[name] if name is not None else None)
                self._present = name
            self._num_uses += 1
            self._is_unused.clear()
        try:
            yield None
        finally:
            self._num_uses -= 1
            if not self._num_uses:
                self._is_unused.set()

    async def _load_state(self, state: AdapterState | None) -> None:
        """Load weights while nothing is sampled; None: the base model's. Raises what `load` raises."""
        if state is None:
            state = await asyncio.to_thread(base_state, self._spec.model_path)
        publication = await asyncio.to_thread(self._publish, state, next(self._numbers))
        try:
            await self.load(publication)
        finally:
            await asyncio.to_thread(shutil.rmtree, publication.directory, ignore_errors=True)

    def _publish(self, state: AdapterState, version: int) -> Publication:
        import torch

        from penstock.workers.weights.publication.publication import PublicationWriter, seal

        weights = state.weights()
        layout = compute_layout((name, values.shape, self._config.dtype) for name, values in weights.items())
        writer = PublicationWriter(self._root.name, version, layout)
        for name, values in weights.items():
            writer.write_elements(name, 0, torch.from_numpy(values).reshape(-1))
        writer.finish()
        return seal(self._root.name, version, layout)


def base_state(model_path: str) -> AdapterState:
    """The weights that a model's files have."""
    from transformers import AutoConfig

    kind = auto_class(AutoConfig.from_pretrained(model_path))
    lm = kind.from_pretrained(model_path, dtype="float32")
    weights = {f"weights/{name}": parameter.detach().numpy() for name, parameter in lm.named_parameters()}
    return AdapterState(AdapterSpec(WHOLE), weights)

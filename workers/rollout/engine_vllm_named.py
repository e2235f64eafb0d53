"""The vLLM engine with many adapters by name (vLLM's multi-LoRA): requests of several of them are decoded together.

    add_adapter ─▶ checked ▸ written as PEFT's files ▸ loaded, so that what vLLM cannot serve is refused here
    sample      ─▶ a request that names the adapter's number and directory
    drop        ─▶ unknown at once; forgotten by vLLM when its last request has ended

vLLM keeps `max_loaded` of them. It drops the one that was asked for least recently, and reads it again from its
directory when a request names it. Each adapter has a number and a directory of its own, never used again: they are part
of vLLM's keys of cached prefixes.

vLLM's CPU kernels take "no adapter", which is number -1, for the last place: where something is loaded there, requests
of the base model would get it. On a CPU these name an adapter of zeros, and so are the base model's to the bit.
"""

import asyncio
import itertools
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
from penstock.workers.calls.training_calls import AdapterSpec, AdapterState
from penstock.workers.lifecycle.concurrent_tasks import cancel_all
from penstock.workers.protocols import AdapterLimits, EngineSpec
from penstock.workers.rollout.engine_vllm import VllmEngine
from penstock.workers.rollout.named_adapters import Shape, check_adapter, write_peft
from penstock.workers.rollout.vllm_conversion import LORA_RANKS
from penstock.workers.rollout.vllm_processes import PHASE_KEY
from penstock.workers.weights.publication.adapter import adapted_layers, tensor_name

ADAPTED_HEADS = ("Qwen2ForCausalLM", "Qwen3ForCausalLM", "LlamaForCausalLM", "MistralForCausalLM")
"""Models whose output layer may have an adapter (`vllm_heads.py`)."""
LARGEST_VOCABULARY = 258_048
"""Largest vocabulary of an output layer that vLLM takes an adapter of."""
KEPT_S = 60.0
"""Seconds that the files of a forgotten adapter stay, for a step that vLLM has planned already."""


@dataclass
class NamedAdapter:
    """An adapter that vLLM knows."""

    request: Any
    """vLLM's `LoRARequest`."""
    num_uses: int = 0
    """Requests in flight."""
    dropped: bool = False


class VllmNamedEngine(VllmEngine):
    """Lifecycle and failures are those of `VllmEngine`; `generate` and `load` are of the base model."""

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
                self._named[name] = NamedAdapter(await self._loaded_adapter(name, state))

    async def drop_adapter(self, name: str) -> None:
        self.check_alive()
        async with self._adding:
            adapter = self._named.pop(name, None)
            if adapter is not None:
                adapter.dropped = True
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
            self._base = await self._loaded_adapter("base", zeros(self._shapes))

    def _lora_request(self) -> Any:
        return self._base

    @asynccontextmanager
    async def _adapter_in_use(self, name: str | None) -> AsyncIterator[Any]:
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
            if adapter.dropped and not adapter.num_uses and self._broken is None and self.llm is not None:
                task = asyncio.create_task(self._forget_unused(adapter))
                self._forgetting.add(task)
                task.add_done_callback(self._forgetting.discard)

    async def _loaded_adapter(self, name: str, state: AdapterState) -> Any:
        """Write an adapter and have vLLM load it. Raises `DataError` where it does not."""
        from vllm.lora.request import LoRARequest

        number = next(self._numbers)
        directory = Path(self._root.name) / str(number)
        await asyncio.to_thread(write_peft, directory, state)
        request = LoRARequest(str(number), number, str(directory))
        try:
            call = self.llm.add_lora(request)
            await self._in_time(f"loading adapter {name!r}", call, self._spec.phase_timeout_s, PHASE_KEY)
        except WeightError as error:
            shutil.rmtree(directory)
            raise DataError(f"adapter {name!r}: vLLM cannot serve it: {error}") from None
        return request

    async def _forget_unused(self, adapter: NamedAdapter) -> None:
        if adapter.num_uses:
            return
        call = self.llm.remove_lora(adapter.request.lora_int_id)
        with suppress(DeadlineExceeded, WeightError, WorkerDied):  # vLLM drops it by itself when it needs the place
            await self._in_time("dropping an adapter", call, self._spec.phase_timeout_s, PHASE_KEY)
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

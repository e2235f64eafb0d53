"""An `AsyncLLM` without vLLM's processes, for tests of what `VllmEngine` asks of it and what comes of its failures."""

import asyncio
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any

import vllm.v1.engine.exceptions  # noqa: F401 - its import starts a process, which no test does for its own

from penstock.conf.errors import WorkerDied
from penstock.workers.rollout.engine_vllm import VllmEngine

Action = Callable[[], Any]


class FakeLLM:
    """Plays `AsyncLLM` in a load and writes down what it was told. `troubles`: by call, what goes wrong."""

    def __init__(self, **troubles: Action) -> None:
        self.calls: list[str] = []
        self.version = "0"
        self.errored = False
        self.finish_reason = "stop"
        self.forgets_prefixes, self.clears_cache = True, True
        self.output_processor = SimpleNamespace(request_states={})
        self.salts: list[str | None] = []
        """Salt of each request's cached blocks."""
        self.troubles = troubles

    async def _do(self, name: str) -> None:
        self.calls.append(name)
        if name in self.troubles:
            result = self.troubles[name]()
            if asyncio.iscoroutine(result):
                await result

    async def pause_generation(self, *, mode: str, clear_cache: bool) -> None:
        assert mode == "keep"
        self.clears_cache = clear_cache
        await self._do("pause")

    async def reset_prefix_cache(self) -> bool:
        await self._do("reset")
        return self.forgets_prefixes

    async def init_weight_transfer_engine(self, request: Any) -> None:
        await self._do("prepare")

    async def start_weight_update(self) -> None:
        await self._do("start")

    async def update_weights(self, request: Any) -> None:
        await self._do("load")

    async def finish_weight_update(self, weight_version: str) -> None:
        self.version = weight_version
        await self._do("finish")

    async def get_weight_version(self) -> str:
        await self._do("version")
        return self.version

    async def resume_generation(self) -> None:
        await self._do("resume")

    async def generate(self, prompt: Any, *_: Any, **__: Any) -> AsyncIterator[Any]:
        self.salts.append(prompt.get("cache_salt"))
        await self._do("generate")
        logprobs = SimpleNamespace(logprobs=[], start_indices=[])
        sample = SimpleNamespace(
            finish_reason=self.finish_reason, token_ids=[], logprobs=logprobs, weight_versions=[], text=""
        )
        yield SimpleNamespace(outputs=[sample], num_cached_tokens=0)

    async def abort(self, request_id: Any) -> None:
        await self._do("abort")


def hang() -> Any:
    return asyncio.sleep(60)


def fail() -> Any:
    raise Exception("the worker says: cannot")


def is_serving(engine: VllmEngine) -> bool:
    try:
        engine.check_alive()
    except WorkerDied:
        return False
    return True

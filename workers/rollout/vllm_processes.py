"""The processes of one vLLM engine, seen from the process that starts them: started, called within deadlines, ended,
and what they have failed with.

They are children of this process, and their output is kept for the error message when they die (`engine_output.py`).
vLLM is imported when they are started.
"""

import asyncio
import gc
from collections.abc import Awaitable
from typing import Any, TypeVar

from penstock.conf.errors import DeadlineExceeded, PenstockError, ResourceError, WeightError, WorkerDied
from penstock.conf.rollout import RolloutConfig
from penstock.metering.meters import Meters
from penstock.workers.rollout.engine_output import EngineOutput, explained
from penstock.workers.rollout.vllm_conversion import engine_arguments, vllm_environment

T = TypeVar("T")


class VllmProcesses:
    """Base of the engines. Lifecycle: `_build` once, `_in_time` for each call, `close`. Once they are broken, they are
    of no use any more."""

    def __init__(
        self,
        config: RolloutConfig,
        model_path: str,
        *,
        num_threads: int,
        transport: str,
        by_priority: bool,
        meters: Meters | None,
    ) -> None:
        """Arguments as those of `VllmEngine`."""
        self._config = config
        self._model_path = model_path
        self._num_threads = num_threads
        self._transport = transport
        self._by_priority = by_priority
        self._meters = meters
        self._llm: Any = None
        self._stats: Any = None
        """The `VllmStats`, once the engine is started with meters."""
        self._broken: str | None = None
        """The reason why the engine is broken."""
        self._output = EngineOutput()

    def _build(self) -> None:
        """Start them. Raises `ResourceError`."""
        with self._output.captured(), vllm_environment(self._config, self._model_path, self._num_threads):
            from vllm import AsyncEngineArgs
            from vllm.v1.engine.async_llm import AsyncLLM

            try:
                arguments = AsyncEngineArgs(**self._arguments())
                self._llm = AsyncLLM.from_engine_args(arguments, stat_loggers=self._stat_loggers())
            except (RuntimeError, ValueError, OSError) as error:
                told = explained(str(error), self._output.tail())
                raise ResourceError(
                    f"the vLLM engine for {self._model_path} did not start: {told}\nIts memory is set by "
                    "rollout.kv_cache_gib and rollout.max_model_len, on a GPU by rollout.gpu_memory_utilization."
                ) from None

    def _arguments(self) -> dict[str, Any]:
        arguments = engine_arguments(self._config, self._model_path, self._transport)
        return {"scheduling_policy": "priority"} | arguments if self._by_priority else arguments

    def _stat_loggers(self) -> list[Any]:
        """The factories of stat loggers; vLLM gathers its statistics only where there is one."""
        if self._meters is None:
            return []
        from penstock.workers.rollout.vllm_stats import VllmStats

        self._stats = VllmStats(self._meters)
        return [self._stats.logger]

    async def close(self) -> None:
        llm, self._llm = self._llm, None
        self._broken = self._broken or "it was closed"
        if llm is not None:
            llm.shutdown()  # blocks on purpose: its output task must not run and report the end as a failure
            await asyncio.sleep(0.01)  # its cancelled tasks end
            del llm
            gc.collect()  # a cycle would keep it until the interpreter ends, when its __del__ fails noisily

    def _is_gone(self) -> bool:
        return self._llm is None or self._llm.errored

    async def _in_time(self, what: str, call: Awaitable[T], timeout_s: float, key: str) -> T:
        """Return the call's result. Raises `DeadlineExceeded` naming `what`; the engine's own failures as
        `WeightError`, `WorkerDied`."""
        try:
            return await asyncio.wait_for(call, timeout_s)
        except TimeoutError:
            raise DeadlineExceeded(
                f"{what}: the vLLM engine for {self._model_path} did not answer within {timeout_s:g} s. Raise {key}, "
                "or see its log."
            ) from None
        except PenstockError:
            raise
        except Exception as error:  # noqa: BLE001 - vLLM reports failures of its processes as bare Exceptions with text
            if self._llm is not None and self._llm.errored:
                raise self._died(error) from None
            raise WeightError(f"{what}: {error}") from None

    def _died(self, reason: object) -> WorkerDied:
        self._broken = self._broken or str(reason)
        told = explained(str(reason), self._output.tail())
        return WorkerDied(f"the vLLM engine for {self._model_path} is gone: {told}")

    def _check_alive(self) -> None:
        if self._broken is not None or self._llm is None:
            reason = self._broken or "it was never started"
            raise WorkerDied(f"the vLLM engine for {self._model_path} is not serving: {reason}.")

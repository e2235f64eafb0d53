"""Extensions of vLLM, by its own interfaces: what an engine notes after each step, and calls that its worker processes
answer. Imports vLLM, and so is imported late.

    VllmStats       `stat_loggers` of `AsyncLLM`: its queue, its KV cache, its prefix cache, noted in `Meters`
    WorkerCalls     `worker_extension_cls`: how many threads compute in a worker process, and whether its weights are
                    finite

vLLM's CPU worker takes `torch.set_num_threads` away from its process once it binds threads. It imports this module
before, and Penstock's engines bind none.
"""

from collections.abc import Callable
from typing import Any

from torch import set_num_threads
from vllm.v1.metrics.loggers import StatLoggerBase

from penstock.metering import table
from penstock.metering.meters import Meters
from penstock.workers.rollout.nonfinite import nonfinite


class VllmStats:
    """Lifecycle: made before the engine, whose `logger` writes into it."""

    def __init__(self, meters: Meters) -> None:
        self.num_waiting = 0
        """Number of sequences in the queue after the last step."""
        self._meters = meters
        for counter in (table.ROLLOUT_PREFIX_LOOKUPS, table.ROLLOUT_PREFIX_HITS):
            meters.add(counter, 0)

    def logger(self, _config: Any, _engine_index: int) -> StatLoggerBase:
        """Make a stat logger; the signature is that of vLLM's factories."""
        return _Logger(self)

    def note(self, stats: Any) -> None:
        """Note the statistics of one step. `stats`: vLLM's `SchedulerStats`."""
        self.num_waiting = stats.num_waiting_reqs + stats.num_skipped_waiting_reqs
        prefixes = stats.prefix_cache_stats
        self._meters.put(table.ROLLOUT_KV_CACHE, stats.kv_cache_usage)
        self._meters.add(table.ROLLOUT_PREFIX_LOOKUPS, prefixes.queries)
        self._meters.add(table.ROLLOUT_PREFIX_HITS, prefixes.hits)


class _Logger(StatLoggerBase):
    def __init__(self, stats: VllmStats) -> None:
        self._stats = stats

    def record(
        self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
    ) -> None:
        if scheduler_stats is not None:
            self._stats.note(scheduler_stats)

    def log_engine_initialized(self) -> None:
        """Do nothing: there is nothing to note of the engine's settings."""


class WorkerCalls:
    """The extension of vLLM's worker."""

    get_model: Callable[[], Any]
    """vLLM's own method."""

    def nonfinite_weights(self) -> list[str]:
        """Names of weights that are not finite numbers."""
        return nonfinite(self.get_model())

    def use_threads(self, num_threads: int) -> None:
        """Compute with this number of threads from the next decode step on."""
        set_num_threads(num_threads)

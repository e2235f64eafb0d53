"""Loaded into vLLM's worker processes: changes how many threads compute there. Asked by `engine_vllm.py`, which names
it as the engine's `worker_extension_cls`.

vLLM's CPU worker takes `torch.set_num_threads` away from its process once it binds threads; this module is imported
before, and its engines bind none.
"""

from torch import set_num_threads


class WorkerThreads:
    """A part of vLLM's worker."""

    def use_threads(self, num_threads: int) -> None:
        """From the next decode step on."""
        set_num_threads(num_threads)

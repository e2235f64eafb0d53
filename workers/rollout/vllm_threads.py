"""An extension of vLLM's worker processes (`worker_extension_cls`) that changes how many threads compute there.

vLLM's CPU worker takes `torch.set_num_threads` away from its process once it binds threads; this module is imported
before, and its engines bind none.
"""

from torch import set_num_threads


class WorkerThreads:
    """The extension of vLLM's worker."""

    def use_threads(self, num_threads: int) -> None:
        """Compute with this number of threads from the next decode step on."""
        set_num_threads(num_threads)

"""vLLM plugin: makes the weight-transfer backend `penstock_shm` known to vLLM, in every process that vLLM starts.

vLLM calls `register` through the entry point `vllm.general_plugins`, in whatever environment Penstock is installed,
also for people who use vLLM without Penstock: so it imports nothing of either beyond vLLM's own factory, and loads the
backend only when an engine asks for it by name.
"""

BACKEND = "penstock_shm"


def register() -> None:
    """Idempotent, as vLLM asks of plugins. A vLLM without weight transfer is left alone."""
    try:
        from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    except ImportError:
        return
    try:
        WeightTransferEngineFactory.register_engine(
            BACKEND, "penstock.workers.weights.vllm_transfer", "ShmTransferEngine"
        )
    except ValueError:
        return  # registered by an earlier call in this process

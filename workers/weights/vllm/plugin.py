"""A vLLM plugin: makes Penstock's weight-transfer backends known to vLLM, in every process that vLLM starts, and asks
the kernel for what vLLM's kernels use.

vLLM calls `register` through the entry point `vllm.general_plugins`, in whatever environment Penstock is installed,
also for people who use vLLM without Penstock: so it imports nothing beyond vLLM's own factory and torch, and loads a
backend only when an engine asks for it by name.
"""

BACKEND = "penstock_shm"
IPC_BACKEND = "penstock_ipc"
CLASSES = {
    BACKEND: ("penstock.workers.weights.vllm.backends", "ShmTransferEngine"),
    IPC_BACKEND: ("penstock.workers.weights.vllm.backends", "PickledIpcEngine"),
}
PICKLED = "pickled_ipc_handles"
"""Field of an update for `IPC_BACKEND`: the handles, pickled."""


def register() -> None:
    """Register the backends. Idempotent, as vLLM asks of plugins. A vLLM without weight transfer is left alone."""
    allow_matrix_tiles()
    try:
        from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    except ImportError:
        return
    for name, (module, class_name) in CLASSES.items():
        try:
            WeightTransferEngineFactory.register_engine(name, module, class_name)
        except ValueError:
            continue  # registered by an earlier call in this process


def allow_matrix_tiles() -> None:
    """Ask Linux for the registers of AMX, where the CPU has them: a process that uses them without having asked is
    ended by SIGILL. vLLM 0.32 uses them in bfloat16, and leaves it to oneDNN and torch's compiler to ask, which they do
    only if they compile something for AMX first.
    """
    import torch

    if torch.cpu._is_amx_tile_supported():
        torch.cpu._init_amx()

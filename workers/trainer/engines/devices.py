"""Moves between the device and the host's memory, where ranks and engines share a device in turns
(`placement=colocated`): what every engine of the trainer has beside its parameters.

DTensors and their moments move by `Tensor.to`, FSDP2's parameters by `Module.to`; DeepSpeed's masters keep their
identity, since it has them in lists of its own, and get other memory. And of activations, between forward and backward.
"""

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

HOST = torch.device("cpu")
MIN_BYTES = 2**16
"""Bytes of the smallest activation that goes to the host: a copy of fewer costs more than they are worth."""


class HostActivations(saved_tensors_hooks):
    """Keeps what a forward within it saves for its backward in the host's memory, page-locked where it comes from a
    GPU, and brings it back when backward asks for it. Like torch's `save_on_cpu`, but for weights, which the engine
    gathers and lets go itself, and for what is small."""

    def __init__(self) -> None:
        super().__init__(_to_host, _from_host)


def _to_host(saved: Tensor) -> tuple[torch.device | None, Tensor]:
    """Where it was, and the copy; None and itself where it stays."""
    if isinstance(saved, nn.Parameter) or isinstance(saved._base, nn.Parameter):
        return None, saved
    if saved.nbytes < MIN_BYTES:
        return None, saved.detach()  # the result of an operation would keep itself alive
    copy = torch.empty_like(saved, device=HOST, pin_memory=saved.is_cuda)
    return saved.device, copy.copy_(saved.detach(), non_blocking=True)


def _from_host(kept: tuple[torch.device | None, Tensor]) -> Tensor:
    device, saved = kept
    return saved if device is None else saved.to(device, non_blocking=True)


def move_buffers(model: nn.Module, device: torch.device) -> None:
    """Move all buffers, and no parameter."""
    for name, buffer in list(model.named_buffers(remove_duplicate=False)):
        put_buffer(model, name, buffer.to(device))


def put_buffer(model: nn.Module, name: str, buffer: torch.Tensor) -> None:
    """Put a buffer into the place of the one of this name."""
    owner, _, attribute = name.rpartition(".")
    setattr(model.get_submodule(owner), attribute, buffer)


def move_moments(optimizer: torch.optim.Optimizer | None, device: torch.device) -> None:
    """Move an optimizer's states, and not what it steps."""
    for state in optimizer.state.values() if optimizer is not None else ():
        for name, value in state.items():
            state[name] = value.to(device, non_blocking=True)


def move_masters(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Give what an optimizer steps memory on the device, with the same values."""
    for group in optimizer.param_groups:
        for master in group["params"]:
            master.data = master.data.to(device, non_blocking=True)


def give_back(device: torch.device) -> None:
    """Wait for copies under way, and give the device's unused memory back, for other processes."""
    if device.type != HOST.type:
        module = torch.get_device_module(device)
        module.synchronize()
        module.empty_cache()

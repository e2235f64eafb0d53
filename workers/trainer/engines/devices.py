"""Moves between the device and the host's memory, where ranks and engines share a device in turns
(`placement=colocated`): what every engine of the trainer has beside its parameters.

DTensors and their moments move by `Tensor.to`, FSDP2's parameters by `Module.to`; DeepSpeed's masters keep their
identity, since it has them in lists of its own, and get other memory.
"""

import torch
from torch import nn

HOST = torch.device("cpu")


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

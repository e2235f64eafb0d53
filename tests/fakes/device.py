"""A device that is not the CPU, without hardware: `torch.device("fakegpu", 0)`, torch's PrivateUse1 in Python.

    DeviceTensor   claims to be there, and holds a tensor of the host, which every operation computes with
    live_bytes()   what lies there: bytes of all storages that some tensor still holds
    crossed        bytes that were copied from the host to the device, and back

It refuses what CUDA refuses: tensors of two devices in one operation (but for numbers and copies), and `numpy`. Values
are real, so that a trainer there can be compared with one on the CPU, and with another one there bit by bit. Importing
it gives torch an accelerator for good: import it only in a process of its own.

Three things of torch are stood in for, since only C++ could give them: pinned memory, streams, and `tensor.data = `
from another device, by which FSDP2 moves buffers.
"""

import contextlib
import gc
import weakref
from collections import Counter
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributed.fsdp._fully_shard import _fsdp_init
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME = "fakegpu"
COPIES = (torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default)
"""Operations on tensors of two devices."""
TO_DEVICE, TO_HOST = "to the device", "to the host"
crossed: Counter[str] = Counter()


class Held:
    """The tensor of the host in the place of the device's memory. Views and aliases share its storage."""

    everything: ClassVar[weakref.WeakSet[Any]] = weakref.WeakSet()

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.everything.add(self)


class DeviceTensor(Tensor):
    __torch_function__ = torch._C._disabled_torch_function_impl
    __hash__ = Tensor.__hash__

    @staticmethod
    def __new__(cls, tensor: Tensor) -> "DeviceTensor":
        return Tensor._make_wrapper_subclass(
            cls,
            tensor.size(),
            strides=tensor.stride(),
            storage_offset=tensor.storage_offset(),
            dtype=tensor.dtype,
            device=DEVICE,
        )

    def __init__(self, tensor: Tensor) -> None:
        self.held = Held(tensor)

    def __repr__(self) -> str:
        return f"DeviceTensor({self.held.tensor})"

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.held.tensor.untyped_storage()

    @property
    def data(self) -> Tensor:
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        if not isinstance(value, DeviceTensor):
            raise RuntimeError("the fake device cannot change a tensor's device in place")
        self.held = value.held

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(function, args, kwargs or {})


def run(function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run an operation of which some tensor is on the device, on the tensors that are held."""
    for tensor in tree_leaves((args, kwargs)):
        if (
            isinstance(tensor, Tensor)
            and not isinstance(tensor, DeviceTensor)
            and tensor.dim()
            and function not in COPIES
        ):
            raise RuntimeError(f"{function}: expected all tensors on one device, found {NAME} and {tensor.device}")
    wanted = torch.device(kwargs["device"]).type if kwargs.get("device") is not None else NAME
    if wanted == NAME and "device" in kwargs:
        kwargs = kwargs | {"device": torch.device("cpu")}
    if function in COPIES:
        _count(function, args, wanted)
    result = function(*tree_map(_held, args), **tree_map(_held, kwargs))
    schema = function._schema
    if schema.is_mutable:
        given = dict(zip((argument.name for argument in schema.arguments), args, strict=False)) | kwargs
        changed = [
            given[a.name] for a in schema.arguments if a.alias_info and a.alias_info.is_write and a.name in given
        ]
        return None if not schema.returns else changed[0] if len(schema.returns) == 1 else tuple(changed)
    return result if wanted != NAME else tree_map(_there, result)


def _count(function: Any, args: Any, wanted: str) -> None:
    """Note the bytes that a copy brings from one side to the other."""
    source = args[1] if function is torch.ops.aten.copy_.default else args[0]
    is_there = isinstance(args[0], DeviceTensor) if source is not args[0] else wanted == NAME
    if isinstance(source, DeviceTensor) != is_there:
        crossed[TO_DEVICE if is_there else TO_HOST] += source.nbytes


def live_bytes() -> int:
    """Bytes on the device that something still refers to."""
    gc.collect()
    storages = (held.tensor.untyped_storage() for held in Held.everything)
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def _held(value: Any) -> Any:
    return value.held.tensor if isinstance(value, DeviceTensor) else value


def _there(value: Any) -> Any:
    return DeviceTensor(value) if isinstance(value, Tensor) else value


class Event:
    def record(self, stream: Any = None) -> "Event":
        return self

    def wait(self, stream: Any = None) -> None:
        """All is done in order."""

    synchronize = wait


class Stream:
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Of any device and priority."""

    def wait_stream(self, other: Any) -> None:
        """All is done in order."""

    wait_event = wait_stream

    def record_event(self, event: Any = None) -> Event:
        return event or Event()


class DeviceModule:
    """`torch.fakegpu`, as `torch.cuda` is for CUDA."""

    Event, Stream = Event, Stream

    def is_available(self) -> bool:
        return True

    is_initialized = is_available

    def _is_in_bad_fork(self) -> bool:
        return False

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def set_device(self, device: Any = None) -> None:
        """There is one."""

    synchronize = manual_seed_all = set_device

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16]

    def empty_cache(self) -> None:
        """Nothing is cached."""

    def current_stream(self, device: Any = None) -> Stream:
        return Stream()

    def stream(self, stream: Any) -> Any:
        return contextlib.nullcontext()


class PinnedMemory:
    """Storages that count as pinned, by their addresses."""

    def __init__(self) -> None:
        self._addresses: set[int] = set()

    def pin(self, tensor: Tensor, device: Any = None) -> Tensor:
        copy = tensor.clone()
        self._addresses.add(copy.untyped_storage().data_ptr())
        return copy

    def is_pinned(self, tensor: Tensor, device: Any = None) -> bool:
        return tensor.untyped_storage().data_ptr() in self._addresses


def _empty(size: Any, dtype: Any = None, *_: Any, **__: Any) -> Tensor:
    return DeviceTensor(torch.empty(size, dtype=dtype))


def _empty_strided(size: Any, stride: Any, dtype: Any = None, *_: Any, **__: Any) -> Tensor:
    return DeviceTensor(torch.empty_strided(size, stride, dtype=dtype))


def _move_states(params: list[Tensor], buffers: list[Tensor], device: torch.device) -> None:
    for tensor in (*params, *buffers):
        if not tensor.is_meta and tensor.device != device:
            torch.utils.swap_tensors(tensor, tensor.to(device))


_setup_privateuseone_for_python_backend(NAME, backend_module=DeviceModule())
DEVICE = torch.device(NAME, 0)
_PINNED, _KERNELS = PinnedMemory(), torch.library.Library("aten", "IMPL")
_KERNELS.impl("empty.memory_format", _empty, "PrivateUse1")
_KERNELS.impl("empty_strided", _empty_strided, "PrivateUse1")
_KERNELS.impl("_pin_memory", _PINNED.pin, "CPU")
_KERNELS.impl("is_pinned", _PINNED.is_pinned, "CPU")
_fsdp_init._move_states_to_device = _move_states

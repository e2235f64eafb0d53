"""The one place for a LoRA adapter in a model, which many adapters take turns in.

    model    A [R, in], B [out, R] of every linear layer and of the output layer, sharded by the engine, in every call
    adapter  A [r, in], B [out, r], r <= R: the first rows of the slot's A and the first columns of its B

What an adapter does not use is zero, weights and moments, and stays so: the gradient of a row of A has its column of B
for a factor, and the other way round, so that both are zero while both are, and AdamW adds nothing to a zero. So is
what an adapter leaves out (`AdapterSpec.train_attn` and the like). Every product has the same shape whichever adapter
is there: none changes another's bits.

`whole.py` has a slot of the same kind for all weights of a model.

Legend: R rank of the slot, r rank of an adapter.
"""

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from penstock.workers.calls.training_calls import AdapterSpec
from penstock.workers.trainer.engines.fsdp import FsdpEngine
from penstock.workers.trainer.engines.lora import ADAPTER, adapters
from penstock.workers.trainer.engines.mesh import local
from penstock.workers.trainer.engines.optimizer import MOMENTS, moments_of, set_num_steps
from penstock.workers.trainer.models.output_layer import AdaptedOutputLayer
from penstock.workers.weights.piece import Piece
from penstock.workers.weights.publication.adapter import tensor_name

WEIGHTS, GRADIENTS = "weights", "gradients"
KINDS = (WEIGHTS, *MOMENTS, GRADIENTS)
"""What an adapter has of every tensor; gradients only between a backward pass and the next step."""


class Part(Protocol):
    """A tensor of a slot."""

    @property
    def name(self) -> str:
        """Name in `AdapterState.tensors`."""

    @property
    def parameter(self) -> Any: ...

    @property
    def is_cut_in_columns(self) -> bool:
        """True if tensor parallelism may give this rank some columns alone."""

    def shape(self, rank: int) -> tuple[int, ...]:
        """Shape of an adapter's own tensor."""


P = TypeVar("P", bound=Part)


@dataclass(frozen=True)
class AdapterPart:
    """A or B of one layer in the slot."""

    name: str
    """PEFT's name in an adapter's file."""
    parameter: Any
    is_a: bool
    module: Any
    """The layer that has it."""
    group: str
    """Group of layers: attn, mlp or unembed."""

    @property
    def is_cut_in_columns(self) -> bool:
        return self.is_a

    def shape(self, rank: int) -> tuple[int, int]:
        rows, columns = self.parameter.shape
        return (rank, columns) if self.is_a else (rows, rank)


@dataclass(frozen=True)
class Held:
    """This rank's elements of an adapter that is not in the slot, in the host's memory."""

    tensors: dict[str, dict[str, Tensor]]
    """Tensors of each kind by name, of the parts that are trained."""
    num_steps: int


class Slot(ABC, Generic[P]):
    """The slot of one rank. All ranks make the same calls; those that say so are collective."""

    parts: list[P]

    def __init__(self, engine: FsdpEngine) -> None:
        assert engine.optimizer is not None
        self._engine, self._optimizer = engine, engine.optimizer

    @abstractmethod
    def parts_of(self, spec: AdapterSpec) -> list[P]:
        """The parts that an adapter trains, in the model's order."""

    @torch.no_grad()
    def take(self, spec: AdapterSpec, num_steps: int) -> Held:
        """Copy the adapter that is here to the host's memory."""
        tensors: dict[str, dict[str, Tensor]] = {kind: {} for kind in KINDS}
        for part in self.parts_of(spec):
            for kind, tensor in self._tensors(part):
                if tensor is not None:
                    tensors[kind][part.name] = self._own(part, spec.rank, tensor).to("cpu", copy=True)
        return Held(tensors, num_steps)

    @torch.no_grad()
    def put(self, spec: AdapterSpec, held: Held) -> None:
        """Bring an adapter here that was taken before, in the place of another."""
        self._clear(spec)
        for part in self.parts_of(spec):
            for kind, tensors in held.tensors.items():
                if part.name in tensors:
                    self._own(part, spec.rank, self._tensor(part, kind)).copy_(tensors[part.name])
        set_num_steps(self._optimizer, held.num_steps)

    @torch.no_grad()
    def fill(self, spec: AdapterSpec, whole: Mapping[str, np.ndarray], num_steps: int) -> None:
        """Bring an adapter here of whole tensors by their names in `AdapterState.tensors`. Those that it lacks are
        zero; where there are no weights at all, it begins anew."""
        self._clear(spec)
        is_new = not any(name.startswith(f"{WEIGHTS}/") for name in whole)
        for part in self.parts_of(spec):
            if is_new:
                self._begin(part, spec)
            for kind in KINDS:
                if (values := whole.get(f"{kind}/{part.name}")) is not None:
                    self._cut(part, spec, self._tensor(part, kind), values)
        set_num_steps(self._optimizer, num_steps)

    @torch.no_grad()
    def pieces(self, spec: AdapterSpec, kind: str) -> Iterator[Piece]:
        """This rank's pieces of the adapter that is here, one a tensor, of the adapter's own shapes."""
        for part in self.parts_of(spec):
            tensor = dict(self._tensors(part))[kind]
            if tensor is not None:
                own = self._own(part, spec.rank, tensor)
                yield self._engine.own_piece(part.name, part.parameter, own, part.shape(spec.rank))

    def fill_gradients(self) -> None:
        """Give a gradient of zeros to each tensor that has none, so that all take part in a step."""
        for part in self.parts:
            if part.parameter.grad is None:
                part.parameter.grad = torch.zeros_like(part.parameter)

    @abstractmethod
    def _begin(self, part: P, spec: AdapterSpec) -> None:
        """Give a part its first weights; all is zero before."""

    def _own(self, part: P, rank: int, tensor: Tensor) -> Tensor:
        """What this rank has of an adapter's own part of a tensor, a view."""
        return local(tensor)

    def _cut(self, part: P, spec: AdapterSpec, tensor: Tensor, values: np.ndarray) -> None:
        """Copy this rank's share of a whole tensor."""
        rows, columns = self._engine.place(part.parameter)
        own = self._own(part, spec.rank, tensor)
        cut = torch.from_numpy(values.reshape(-1)[rows.start] if not values.ndim else values[rows.start :][: len(own)])
        own.copy_(cut[:, columns] if part.is_cut_in_columns else cut)

    def _tensors(self, part: P) -> Iterator[tuple[str, Tensor | None]]:
        moments = moments_of(self._optimizer, part.parameter)
        yield WEIGHTS, part.parameter
        for moment in MOMENTS:
            yield moment, moments[moment]
        yield GRADIENTS, part.parameter.grad

    def _tensor(self, part: P, kind: str) -> Tensor:
        """A tensor of the slot, made if it is a gradient that is not there."""
        if kind == GRADIENTS and part.parameter.grad is None:
            part.parameter.grad = torch.zeros_like(part.parameter)
        tensor = dict(self._tensors(part))[kind]
        assert tensor is not None
        return tensor

    def _clear(self, spec: AdapterSpec) -> None:
        """Set all to zero, and drop gradients, for the adapter that comes."""
        self._engine.free()
        for part in self.parts:
            part.parameter.grad = None
            for _, tensor in self._tensors(part):
                if tensor is not None:
                    local(tensor).zero_()


class AdapterSlot(Slot[AdapterPart]):
    """The slot of LoRA adapters."""

    def __init__(self, engine: FsdpEngine) -> None:
        """`engine`: of a model with adapters of rank R around all layers that may have one."""
        super().__init__(engine)
        self.parts = list(_parts(engine.model.lm))

    def parts_of(self, spec: AdapterSpec) -> list[AdapterPart]:
        trained = {"attn": spec.train_attn, "mlp": spec.train_mlp, "unembed": spec.train_unembed}
        return [part for part in self.parts if trained[part.group]]

    def _begin(self, part: AdapterPart, spec: AdapterSpec) -> None:
        if part.is_a:
            self._cut(part, spec, part.parameter, initial_a(part.name, part.shape(spec.rank), spec.seed))

    def _own(self, part: AdapterPart, rank: int, tensor: Tensor) -> Tensor:
        """The adapter's own rows of A or columns of B."""
        values = local(tensor)
        if not part.is_a:
            return values[:, :rank]
        first = self._engine.place(part.parameter)[0].start
        return values[: min(max(0, rank - first), len(values))]

    def _clear(self, spec: AdapterSpec) -> None:
        """Take the scale of the adapter that comes, too."""
        super()._clear(spec)
        for part in self.parts:
            part.module.scaling[ADAPTER] = spec.alpha / spec.rank
            if isinstance(part.module, AdaptedOutputLayer):
                part.module.is_adapted = spec.train_unembed


def initial_a(name: str, shape: tuple[int, int], seed: int) -> np.ndarray:
    """First values of A: uniform in ±1/sqrt(in), as PEFT draws them (Kaiming with a = sqrt(5)). They depend on the
    tensor's name and shape and on the seed alone.

    Returns `shape`, float32.
    """
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little", signed=True))
    bound = 1.0 / math.sqrt(shape[1])
    return torch.empty(shape, dtype=torch.float32).uniform_(-bound, bound, generator=generator).numpy()


def _parts(lm: Any) -> Iterator[AdapterPart]:
    for adapter in adapters(lm):
        module = lm.get_submodule(adapter.path)
        group = "unembed" if isinstance(module, AdaptedOutputLayer) else _group(adapter.path)
        yield AdapterPart(tensor_name(adapter.path, "A"), adapter.a, True, module, group)
        yield AdapterPart(tensor_name(adapter.path, "B"), adapter.b, False, module, group)


def _group(path: str) -> str:
    """Group of a layer by its name, e.g. `model.layers.0.self_attn.q_proj`."""
    names = path.split(".")[:-1]
    return "attn" if any("attn" in name or "attention" in name for name in names) else "mlp"

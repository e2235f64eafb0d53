"""A rank of a trainer that many adapters share: a frozen model with one slot, and the adapters that take turns in it.

    create(name) ─▶ forward(name, data, loss, backward=True) … ─▶ step(name) ─▶ … ─▶ state(name) ─▶ drop(name)

Each call gets this rank's share of a request's data. What a request gets depends on its own data and on its adapter,
never on other requests: micro-batches are cut for it alone, and adapters are exchanged exactly. One adapter is in the
slot, the others are in the host's memory, each with its weights, moments, gradients that wait for their step, and its
count of steps. All ranks make the same calls.

    model    A [R, in], B [out, R] of every linear layer and of the output layer, sharded by the engine, in every call
    adapter  A [r, in], B [out, r], r <= R: the first rows of the slot's A and the first columns of its B

What an adapter does not use is zero, weights and moments, and stays so: the gradient of a row of A has its column of B
for a factor, and the other way round, so that both are zero while both are, and AdamW adds nothing to a zero. So is
what an adapter leaves out (`AdapterSpec.train_attn` and the like). Every product has the same shape whichever adapter
is there: none changes another's bits.

A slot for whole models (`WholeSlot`) has all weights that a model trains in the place of an adapter's. The base model's
weights stay in the host's memory, for those that begin.

Legend: R rank of the slot, r rank of an adapter.
"""

import hashlib
import math
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from penstock.conf.capabilities import TRAINERS, names_with
from penstock.conf.errors import ConfigError, DataError, suggest
from penstock.conf.trainer import LoraConfig, TrainerConfig
from penstock.workers.protocols import (
    WHOLE,
    AdamParams,
    AdapterSpec,
    AdapterState,
    Datum,
    ForwardOutput,
    LossCall,
)
from penstock.workers.trainer.datum_trainer import DatumTrainer
from penstock.workers.trainer.engines.fsdp import FsdpEngine
from penstock.workers.trainer.engines.lora import ADAPTER, adapters
from penstock.workers.trainer.engines.mesh import local
from penstock.workers.trainer.engines.train_engine import MOMENTS, moments_of, set_num_steps
from penstock.workers.trainer.models.token_scores import AdaptedOutputLayer
from penstock.workers.weights.piece import Piece, boxes
from penstock.workers.weights.publication.adapter import tensor_name

WEIGHTS, GRADIENTS = "weights", "gradients"
KINDS = (WEIGHTS, *MOMENTS, GRADIENTS)
"""What an adapter has of every tensor; gradients only between a backward pass and the next step."""


@dataclass
class SlotAdapter:
    """An adapter of a rank."""

    spec: AdapterSpec
    num_steps: int = 0
    stored: dict[str, dict[str, Tensor]] | None = None
    """Its tensors in the host's memory (`Slot.take`); None: it is in the slot."""


class SlotTrainer(DatumTrainer):
    """A `PolicyTrainer` whose adapters are trained by name. Every method is collective. Wrong arguments, such as an
    unknown name, raise `DataError` on all ranks alike, and change nothing.

        trainer = SlotTrainer(TrainerConfig(lora=LoraConfig(rank=32)), "path/to/model")     # rank: of the slot
        trainer.create("mine", AdapterSpec(rank=8, seed=1))
        trainer.forward("mine", data, LossCall("cross_entropy"), backward=True)
        trainer.step("mine", AdamParams(learning_rate=1e-4))
    """

    def _make(self, model_path: str, attention: str) -> None:
        super()._make(model_path, attention)
        assert isinstance(self.engine, FsdpEngine)
        is_whole = self.config.lora.rank == WHOLE
        self.slot: AdapterSlot | WholeSlot = WholeSlot(self.engine) if is_whole else AdapterSlot(self.engine)
        self._adapters: dict[str, SlotAdapter] = {}
        self._current: str | None = None
        """Name of the adapter in the slot."""

    def _add_adapters(self) -> dict[str, Tensor]:
        """Put adapters around linear layers and the output layer."""
        values = super()._add_adapters()
        lm = self.model.lm
        head = AdaptedOutputLayer.around(lm.get_output_embeddings(), ADAPTER, self.config.lora.rank)
        lm.set_output_embeddings(head)
        (path,) = (name for name, module in lm.named_modules() if module is head)
        for letter in ("lora_A", "lora_B"):
            values[f"{path}.{letter}.{ADAPTER}.weight"] = torch.zeros(getattr(head, letter)[ADAPTER].weight.shape)
        return values

    def create(self, name: str, spec: AdapterSpec, state: AdapterState | None = None) -> None:
        """Make an adapter in the slot, in the place of one of that name: new, as the base model is, or of a state, from
        which training continues bit for bit. Raises `DataError` for a rank that does not fit and a state of other
        tensors."""
        check_rank(spec, self.config.lora.rank)
        self._check_state(spec, state)
        self._vacate()
        tensors, num_steps = ({}, 0) if state is None else (state.tensors, state.num_steps)
        self.slot.fill(spec, tensors, num_steps)
        self._adapters[name], self._current = SlotAdapter(spec, num_steps), name

    def drop(self, name: str) -> None:
        """Forget an adapter, if there is one of that name."""
        self._adapters.pop(name, None)
        if self._current == name:
            self._current = None

    def state(self, name: str) -> AdapterState | None:
        """The whole state on rank 0, for any number of ranks to continue from; None on the others."""
        with self._phase(f"state of adapter {name}"):
            adapter = self._enter(name)
            tensors: dict[str, np.ndarray] = {}
            for kind in KINDS:
                own = [
                    (f"{kind}/{box.name}", box.shape, box.corner, box.values.cpu().numpy())
                    for box in boxes(self.slot.pieces(adapter.spec, kind))
                ]
                for key, shape, corner, values in self.ranks.gather_first(own):
                    whole = tensors.setdefault(key, np.zeros(shape, np.float32))
                    whole[tuple(slice(first, first + n) for first, n in zip(corner, values.shape, strict=True))] = (
                        values
                    )
            return AdapterState(adapter.spec, tensors, adapter.num_steps) if self.ranks.rank == 0 else None

    def forward(self, name: str, data: Sequence[Datum], loss: LossCall | None, *, backward: bool) -> ForwardOutput:
        """Score the targets of this rank's data; with `backward` gradients of the summed loss are added to the
        adapter's. `loss` None: scores alone. Metrics are those of all ranks' data: `loss`."""
        self._enter(name)
        return self.forward_data(data, loss, backward=backward)

    def step(self, name: str, params: AdamParams) -> dict[str, float]:
        """Step by the gradients since the adapter's last step, and clear them. Without any it is a step of AdamW by
        gradients of 0, as torch takes it: moments decay, and weights move on by what is left of them.

        Returns `grad_norm`, that before clipping, over all that the adapter trains, and `skipped_nonfinite`: 1 where it
        is not finite, which leaves weights, moments and the count of steps as they were, and clears the gradients.
        """
        check_params(params)
        adapter = self._enter(name)
        self.slot.fill_gradients()
        norm = self._optimizer_step(params, defaultdict(float))
        is_finite = math.isfinite(norm)
        adapter.num_steps += is_finite
        return {"grad_norm": norm, "skipped_nonfinite": float(not is_finite)}

    def _enter(self, name: str) -> SlotAdapter:
        """Bring an adapter into the slot, if it is not there. Raises `DataError` for an unknown name."""
        adapter = self._adapters.get(name)
        if adapter is None:
            raise DataError(f"there is no adapter {name!r}{suggest(name, self._adapters)}")
        if self._current != name:
            self._vacate()
            assert adapter.stored is not None
            self.slot.put(adapter.spec, adapter.stored, adapter.num_steps)
            adapter.stored, self._current = None, name
        return adapter

    def _vacate(self) -> None:
        """Take the current adapter out of the slot."""
        if self._current is not None:
            adapter = self._adapters[self._current]
            adapter.stored = self.slot.take(adapter.spec)
            self._current = None

    def _check_state(self, spec: AdapterSpec, state: AdapterState | None) -> None:
        parts = self.slot.parts_of(spec)
        if not parts:
            raise DataError("an adapter of no layers. Set one of train_attn, train_mlp and train_unembed.")
        if state is None:
            return
        shapes = {part.name: part.shape(spec.rank) for part in parts}
        for key, values in state.tensors.items():
            kind, _, name = key.partition("/")
            if kind not in KINDS or shapes.get(name) != tuple(values.shape):
                raise DataError(
                    f"the adapter's state has {key!r} of shape {list(values.shape)}; expected "
                    f"{list(shapes[name]) if name in shapes else 'no such tensor'}. It is of another model or rank."
                )
        kinds = {key.partition("/")[0] for key in state.tensors}
        for kind in sorted(kinds | {WEIGHTS}):
            missing = [name for name in shapes if f"{kind}/{name}" not in state.tensors]
            if missing:
                raise DataError(f"the adapter's state lacks {kind}/{missing[0]!s}. It is of another model or adapter.")


def with_slot(config: TrainerConfig, rank: int) -> TrainerConfig:
    """The configuration of a trainer with a slot of this rank; `WHOLE`: of one for whole models. Each adapter brings
    its own alpha and optimizer. Raises `ConfigError` for an engine that has none."""
    if not config.capabilities.takes_turns:
        raise ConfigError(
            f"trainer.engine={config.engine}: adapters that take turns in a model are for trainer.engine="
            f"{names_with('takes_turns', TRAINERS)} only. Choose that."
        )
    return replace(config, lora=LoraConfig(rank=rank, alpha=rank) if rank else LoraConfig(), num_minibatches=1)


def check_rank(spec: AdapterSpec, largest: int) -> None:
    """Raise `DataError` for a rank that a slot does not have room for; a slot for whole models has `WHOLE` alone."""
    lowest = min(1, largest)
    if not lowest <= spec.rank <= largest:
        raise DataError(
            f"an adapter of rank {spec.rank}: ranks from {lowest} to {largest} are served. Ask for one of "
            "them, or raise serve.max_rank."
        )


def check_params(params: AdamParams) -> None:
    """Raise `DataError` for numbers that AdamW cannot step by. `eps` must be above 0: what an adapter leaves out has
    moments of 0, which AdamW divides."""
    finite = all(math.isfinite(value) for value in vars(params).values())
    betas = all(0 <= beta < 1 for beta in (params.beta1, params.beta2))
    rest = min(params.learning_rate, params.weight_decay, params.grad_clip_norm) >= 0 and params.eps > 0
    if not (finite and betas and rest):
        raise DataError(
            f"{params}: learning_rate, weight_decay and grad_clip_norm must be at least 0, betas from 0 to below 1, "
            "and eps above 0."
        )


@dataclass(frozen=True)
class SlotTensor:
    """A tensor of a slot: a parameter of the whole model."""

    name: str
    """Name in `AdapterState.tensors`."""
    parameter: Any

    @property
    def is_cut_in_columns(self) -> bool:
        """True if tensor parallelism may give this rank some columns alone."""
        return bool(self.parameter.ndim > 1)

    def shape(self, rank: int) -> tuple[int, ...]:
        """Shape of the tensor of an adapter of this rank."""
        return tuple(self.parameter.shape)


P = TypeVar("P", bound=SlotTensor)


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
    def take(self, spec: AdapterSpec) -> dict[str, dict[str, Tensor]]:
        """Copy the adapter in the slot to the host's memory: this rank's elements of the tensors that it trains, by
        kind and name."""
        tensors: dict[str, dict[str, Tensor]] = {kind: {} for kind in KINDS}
        for part in self.parts_of(spec):
            for kind, tensor in self._tensors(part):
                if tensor is not None:
                    tensors[kind][part.name] = self._own(part, spec.rank, tensor).to("cpu", copy=True)
        return tensors

    @torch.no_grad()
    def put(self, spec: AdapterSpec, stored: Mapping[str, Mapping[str, Tensor]], num_steps: int) -> None:
        """Put an adapter that was taken before into the slot, in the place of another."""
        self._clear(spec)
        for part in self.parts_of(spec):
            for kind, tensors in stored.items():
                if part.name in tensors:
                    self._own(part, spec.rank, self._tensor(part, kind)).copy_(tensors[part.name])
        set_num_steps(self._optimizer, num_steps)

    @torch.no_grad()
    def fill(self, spec: AdapterSpec, whole: Mapping[str, np.ndarray], num_steps: int) -> None:
        """Put an adapter into the slot, of whole tensors by their names in `AdapterState.tensors`. Those that it lacks
        are zero; where there are no weights at all, it starts anew."""
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
        """This rank's pieces of the adapter in the slot, one a tensor, of the adapter's own shapes."""
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


@dataclass(frozen=True)
class AdapterTensor(SlotTensor):
    """A or B of one layer in the slot, by PEFT's name in an adapter's file."""

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


class AdapterSlot(Slot[AdapterTensor]):
    """The slot of LoRA adapters."""

    def __init__(self, engine: FsdpEngine) -> None:
        """`engine`: of a model with adapters of rank R around all layers that may have one."""
        super().__init__(engine)
        self.parts = list(_parts(engine.model.lm))

    def parts_of(self, spec: AdapterSpec) -> list[AdapterTensor]:
        trained = {"attn": spec.train_attn, "mlp": spec.train_mlp, "unembed": spec.train_unembed}
        return [part for part in self.parts if trained[part.group]]

    def _begin(self, part: AdapterTensor, spec: AdapterSpec) -> None:
        if part.is_a:
            self._cut(part, spec, part.parameter, initial_a(part.name, part.shape(spec.rank), spec.seed))

    def _own(self, part: AdapterTensor, rank: int, tensor: Tensor) -> Tensor:
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


def _parts(lm: Any) -> Iterator[AdapterTensor]:
    for adapter in adapters(lm):
        module = lm.get_submodule(adapter.path)
        group = "unembed" if isinstance(module, AdaptedOutputLayer) else _group(adapter.path)
        yield AdapterTensor(tensor_name(adapter.path, "A"), adapter.a, True, module, group)
        yield AdapterTensor(tensor_name(adapter.path, "B"), adapter.b, False, module, group)


def _group(path: str) -> str:
    """Group of a layer by its name, e.g. `model.layers.0.self_attn.q_proj`."""
    names = path.split(".")[:-1]
    return "attn" if any("attn" in name or "attention" in name for name in names) else "mlp"


class WholeSlot(Slot[SlotTensor]):
    """The slot of whole models."""

    def __init__(self, engine: FsdpEngine) -> None:
        """`engine`: of a model whose weights are trained. Raises `ConfigError` for one whose checkpoint has its weights
        in another form, such as experts one by one."""
        super().__init__(engine)
        trained = [(name, one) for name, one in engine.model.lm.named_parameters() if one.requires_grad]
        for name, parameter in trained:
            if [part.name for part in engine.form.parts(name, tuple(parameter.shape))] != [name]:
                raise ConfigError(f"serve.full: {name} has another form in checkpoints; models of experts are not "
                                  "served whole. Leave serve.full out.")  # fmt: skip
        self.parts = [SlotTensor(name, parameter) for name, parameter in trained]
        self._base: dict[str, Tensor] = {
            part.name: local(part.parameter).detach().to("cpu", copy=True) for part in self.parts
        }

    def parts_of(self, spec: AdapterSpec) -> list[SlotTensor]:
        return self.parts

    def _begin(self, part: SlotTensor, spec: AdapterSpec) -> None:
        local(part.parameter).copy_(self._base[part.name])

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
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from penstock.conf.capabilities import TRAINERS, names_with
from penstock.conf.errors import ConfigError, DataError, suggest
from penstock.conf.trainer import LoraConfig, TrainerConfig
from penstock.workers.calls.training_calls import (
    WHOLE,
    AdamParams,
    AdapterSpec,
    AdapterState,
    Datum,
    ForwardOutput,
    LossCall,
)
from penstock.workers.trainer.datum_trainer import DatumTrainer
from penstock.workers.trainer.engines.engine import MOMENTS, moments_of, set_num_steps
from penstock.workers.trainer.engines.fsdp import FsdpEngine
from penstock.workers.trainer.engines.lora import ADAPTER, adapters
from penstock.workers.trainer.engines.mesh import local
from penstock.workers.trainer.models.token_scores import AdaptedOutputLayer
from penstock.workers.trainer.ranks import Ranks
from penstock.workers.weights.piece import Piece, boxes
from penstock.workers.weights.publication.adapter import tensor_name

WEIGHTS, GRADIENTS = "weights", "gradients"

KINDS = (WEIGHTS, *MOMENTS, GRADIENTS)
"""What an adapter has of every tensor; gradients only between a backward pass and the next step."""


class SlotTrainer(DatumTrainer):
    """A `PolicyTrainer` whose adapters are trained by name. Every method is collective. Wrong arguments raise
    `DataError` on all ranks alike, and change nothing.

        trainer = SlotTrainer(TrainerConfig(lora=LoraConfig(rank=32)), "path/to/model")     # rank: of the slot
        trainer.create("mine", AdapterSpec(rank=8, seed=1))
        trainer.forward("mine", data, LossCall("cross_entropy"), backward=True)
        trainer.step("mine", AdamParams(learning_rate=1e-4))
    """

    def _make(self, model_path: str, attention: str) -> None:
        super()._make(model_path, attention)
        assert isinstance(self.engine, FsdpEngine)
        rank = self.config.lora.rank
        self.slot: AdapterSlot | WholeSlot = WholeSlot(self.engine) if rank == WHOLE else AdapterSlot(self.engine)
        self.bank = AdapterBank(self.slot, rank, self.ranks)

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
        """Make an adapter, in the place of one of that name: new, as the base model is, or of a state, with which it
        goes on bit for bit. Raises `DataError`."""
        self.bank.create(name, spec, state)

    def drop(self, name: str) -> None:
        """Forget an adapter, if there is one of that name."""
        self.bank.drop(name)

    def state(self, name: str) -> AdapterState | None:
        """The whole state on rank 0, for any number of ranks to go on from; None on the others."""
        with self._phase(f"state of adapter {name}"):
            return self.bank.state(name)

    def forward(self, name: str, data: Sequence[Datum], loss: LossCall | None, *, backward: bool) -> ForwardOutput:
        """Score the targets of this rank's data; with `backward` gradients of the summed loss are added to the
        adapter's. `loss` None: scores alone. Metrics are those of all ranks' data: `loss`."""
        self.bank.enter(name)
        return self.forward_data(data, loss, backward=backward)

    def step(self, name: str, params: AdamParams) -> dict[str, float]:
        """Step by the gradients since the adapter's last step, and clear them. Without any it is a step of AdamW by
        gradients of 0, as torch takes it: moments decay, and weights move on by what is left of them.

        Returns `grad_norm`, that before clipping, over all that the adapter trains, and `skipped_nonfinite`: 1 where it
        is not finite, which leaves weights, moments and the count of steps as they were, and clears the gradients.
        """
        check_params(params)
        known = self.bank.enter(name)
        self.slot.fill_gradients()
        norm = self._optimizer_step(params, defaultdict(float))
        is_finite = math.isfinite(norm)
        known.num_steps += is_finite
        return {"grad_norm": norm, "skipped_nonfinite": float(not is_finite)}


def with_slot(config: TrainerConfig, rank: int) -> TrainerConfig:
    """The configuration of a trainer with a slot of this rank; `WHOLE`: of one for whole models. Each adapter brings
    its own alpha and optimizer. Raises `ConfigError` for an engine that has none."""
    if not config.capabilities.takes_turns:
        raise ConfigError(
            f"trainer.engine={config.engine}: adapters that take turns in a model are for trainer.engine="
            f"{names_with('takes_turns', TRAINERS)} only. Choose that."
        )
    return replace(config, lora=LoraConfig(rank=rank, alpha=rank) if rank else LoraConfig(), num_minibatches=1)


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


@dataclass
class Known:
    """An adapter."""

    spec: AdapterSpec
    num_steps: int = 0
    held: Held | None = None
    """Its tensors; None: it is in the slot."""


class AdapterBank:
    """Adapters by name.

    bank.create("mine", AdapterSpec(rank=8), None)
    bank.enter("mine")            # it is in the slot
    bank.state("mine")            # whole, on rank 0
    """

    def __init__(self, slot: Slot[Any], max_rank: int, ranks: Ranks) -> None:
        """`max_rank`: `WHOLE` for a slot of whole models."""
        self._slot, self._max_rank, self._ranks = slot, max_rank, ranks
        self._known: dict[str, Known] = {}
        self._present: str | None = None
        """Name of the adapter in the slot."""

    def create(self, name: str, spec: AdapterSpec, state: AdapterState | None = None) -> None:
        """Make an adapter, in the place of one of that name; it is in the slot then. Raises `DataError` for a rank that
        does not fit and a state of other tensors, having changed nothing."""
        whole = {} if state is None else dict(state.tensors)
        self._check(spec, state)
        self._leave()
        num_steps = 0 if state is None else state.num_steps
        self._slot.fill(spec, whole, num_steps)
        self._known[name], self._present = Known(spec, num_steps), name

    def drop(self, name: str) -> None:
        """Forget an adapter, if there is one of that name."""
        self._known.pop(name, None)
        if self._present == name:
            self._present = None

    def enter(self, name: str) -> Known:
        """Bring an adapter into the slot, if it is not there. Raises `DataError` for an unknown name."""
        known = self._known.get(name)
        if known is None:
            raise DataError(f"there is no adapter {name!r}{suggest(name, self._known)}")
        if self._present != name:
            self._leave()
            assert known.held is not None
            self._slot.put(known.spec, known.held)
            known.held, self._present = None, name
        return known

    def state(self, name: str) -> AdapterState | None:
        """The whole state, on rank 0; None on others. Collective. Raises `DataError`."""
        known = self.enter(name)
        tensors: dict[str, np.ndarray] = {}
        for kind in KINDS:
            own = [
                (f"{kind}/{box.name}", box.shape, box.corner, box.values.cpu().numpy())
                for box in boxes(self._slot.pieces(known.spec, kind))
            ]
            for key, shape, corner, values in self._ranks.gather_first(own):
                whole = tensors.setdefault(key, np.zeros(shape, np.float32))
                whole[tuple(slice(first, first + n) for first, n in zip(corner, values.shape, strict=True))] = values
        return AdapterState(known.spec, tensors, known.num_steps) if self._ranks.rank == 0 else None

    def _leave(self) -> None:
        """Take the present adapter out of the slot."""
        if self._present is not None:
            known = self._known[self._present]
            known.held = self._slot.take(known.spec, known.num_steps)
            self._present = None

    def _check(self, spec: AdapterSpec, state: AdapterState | None) -> None:
        lowest = min(1, self._max_rank)
        if not lowest <= spec.rank <= self._max_rank:
            raise DataError(
                f"an adapter of rank {spec.rank}: ranks from {lowest} to {self._max_rank} are served. Ask for one of "
                "them, or raise serve.max_rank."
            )
        parts = self._slot.parts_of(spec)
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


@dataclass(frozen=True)
class Weight:
    """A parameter of the model."""

    name: str
    """Name in the model's checkpoint."""
    parameter: Any

    @property
    def is_cut_in_columns(self) -> bool:
        return bool(self.parameter.ndim > 1)

    def shape(self, rank: int) -> tuple[int, ...]:
        """Shape of the parameter; there is no rank."""
        return tuple(self.parameter.shape)


class WholeSlot(Slot[Weight]):
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
        self.parts = [Weight(name, parameter) for name, parameter in trained]
        self._base: dict[str, Tensor] = {
            part.name: local(part.parameter).detach().to("cpu", copy=True) for part in self.parts
        }

    def parts_of(self, spec: AdapterSpec) -> list[Weight]:
        return self.parts

    def _begin(self, part: Weight, spec: AdapterSpec) -> None:
        local(part.parameter).copy_(self._base[part.name])

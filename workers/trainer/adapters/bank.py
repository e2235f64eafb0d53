"""Adapters of a rank by name: one in the slot, the others in the host's memory.

    create ─▶ enter ─▶ the trainer computes ─▶ enter another: the first one is taken out, exactly as it is

Weights, moments, gradients that wait for their step and the count of steps go with an adapter. All ranks make the same
calls.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.conf.errors import DataError, suggest
from penstock.workers.calls.training_calls import AdapterSpec, AdapterState
from penstock.workers.trainer.adapters.slot import KINDS, WEIGHTS, Held, Slot
from penstock.workers.trainer.ranks import Ranks
from penstock.workers.weights.piece import boxes


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

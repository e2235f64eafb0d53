"""Adapters of the hf engine, by name: the one that is asked for is merged into the model's weights. Or whole models, of
which the one that is asked for stands in their place.

    use(a) ─▶ W of its layers stands for W + alpha / rank * B @ A ─▶ use(None) ─▶ W

The model's own parameters are never written to: a layer is given another one while it is adapted. So the base comes
back to the bit, and merged weights depend on nothing that was served in between. A head that shares its weights with
the embedding is adapted alone.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from penstock.conf.errors import UnknownAdapter
from penstock.workers.calls.training_calls import AdapterState
from penstock.workers.protocols import AdapterLimits
from penstock.workers.rollout.named_adapters import check_adapter, check_whole, factors_of


class HfAdapters:
    """Lifecycle: `add`, `drop` and `find` from any thread; `use` and `set_aside` from the one that computes.

    Memory: the adapters themselves, and a second copy of the layers that the one in use changes.
    """

    def __init__(self, lm: Any, limits: AdapterLimits | None) -> None:
        self._lm, self._limits = lm, limits
        self._states: dict[str, AdapterState] = {}
        self._used: AdapterState | None = None
        self._base: dict[str, torch.nn.Parameter] = {}
        """The model's own weights that others stand for now, by their names."""
        self._merged: dict[str, torch.nn.Parameter] = {}
        """Room for other weights, which one adapter after the other takes."""

    def names(self) -> list[str]:
        return list(self._states)

    def add(self, name: str, state: AdapterState) -> None:
        """Keep an adapter; nothing for a name that is there. Raises `DataError` for layers that the model does not
        have, and for a rank beyond the limits."""
        if name not in self._states:
            if state.spec.is_whole:
                check_whole(name, state, {key: tuple(one.shape) for key, one in self._lm.named_parameters()})
            else:
                check_adapter(name, state, self._shape_of, self._limits)
            self._states[name] = state.for_sampling()

    def drop(self, name: str) -> None:
        """Forget an adapter, if it is there. One in use stays so until the next `use`."""
        self._states.pop(name, None)

    def find(self, name: str | None) -> AdapterState | None:
        """The adapter, for `use`. Raises `UnknownAdapter`."""
        if name is None:
            return None
        if name not in self._states:
            raise UnknownAdapter(f"adapter {name!r}: the engine does not have it. Add it before you sample from it.")
        return self._states[name]

    @torch.inference_mode()
    def use(self, state: AdapterState | None) -> None:
        """Change the model's weights to those with an adapter, or to its own."""
        if state is self._used:
            return
        for name, weight in self._base.items():
            self._set(name, weight)
        self._base = {}
        if state is not None and state.spec.is_whole:
            self._replace(state)
        elif state is not None:
            scale = state.spec.alpha / state.spec.rank
            for layer, (a, b) in factors_of(state).items():
                self._merge(layer, scale * (torch.from_numpy(b) @ torch.from_numpy(a)))
        self._used = state

    @contextmanager
    def set_aside(self) -> Iterator[None]:
        """Show the model's own weights within the block, which may change them. The room of merged ones is given
        back."""
        used = self._used
        self.use(None)
        self._merged.clear()
        yield
        self.use(used)

    def _merge(self, layer: str, delta: torch.Tensor) -> None:
        name = f"{layer}.weight"
        base = self._lm.get_parameter(name)
        self._stand_for(base, [name], base.float() + delta.to(base.device))

    def _replace(self, state: AdapterState) -> None:
        """Let a whole model's weights stand in the place of the model's own; a tied one in each of its places."""
        places: dict[int, list[str]] = {}
        for name, weight in self._lm.named_parameters(remove_duplicate=False):
            places.setdefault(id(weight), []).append(name)
        weights = dict(self._lm.named_parameters())
        for name, values in state.weights().items():
            self._stand_for(weights[name], places[id(weights[name])], torch.from_numpy(values))

    def _stand_for(self, base: torch.nn.Parameter, names: list[str], values: torch.Tensor) -> None:
        """Put values in the place of a weight, under all of these names of it."""
        if names[0] not in self._merged:
            self._merged[names[0]] = torch.nn.Parameter(torch.empty_like(base), requires_grad=False)
        self._merged[names[0]].copy_(values)
        for name in names:
            self._base[name] = base
            self._set(name, self._merged[names[0]])

    def _set(self, name: str, weight: torch.nn.Parameter) -> None:
        module, _, own = name.rpartition(".")
        setattr(self._lm.get_submodule(module), own, weight)

    def _shape_of(self, layer: str) -> tuple[int, int] | None:
        try:
            module = self._lm.get_submodule(layer)
        except AttributeError:
            return None
        return (module.out_features, module.in_features) if isinstance(module, torch.nn.Linear) else None

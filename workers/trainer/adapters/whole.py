"""A slot for whole models: all weights that a model trains stand in the place of an adapter's, so that one who comes
first, rests, is saved and is brought back as adapters are (`slot.py`).

The base model's weights stay in the host's memory, for those that begin.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from penstock.conf.errors import ConfigError
from penstock.workers.calls.training_calls import AdapterSpec
from penstock.workers.trainer.adapters.slot import Slot
from penstock.workers.trainer.engines.fsdp import FsdpEngine
from penstock.workers.trainer.engines.mesh import local


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

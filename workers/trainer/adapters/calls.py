"""The calls of a rank's actor that take data with targets of their own: for the weights that it trains, or for adapters
by name. Light to import: torch comes with the rank's parts."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from penstock.conf.errors import NotStarted
from penstock.workers.calls.training_calls import AdamParams, AdapterSpec, AdapterState, Datum, ForwardOutput, LossCall

if TYPE_CHECKING:
    from penstock.workers.trainer.adapters.slot_trainer import SlotTrainer


class DatumCalls:
    """Methods that `Trainer` inherits; those with a name are for a specification with a `slot_rank`. All are
    collective: every rank gets the same call with the same arguments, but for its own share of the data. Wrong
    arguments raise `DataError` on all ranks alike, and change nothing; they raise `PartnerGone` where a rank dies."""

    if TYPE_CHECKING:

        @property
        def _parts(self) -> Any: ...

        def _together(self, name: str) -> AbstractContextManager[None]: ...

    def forward_data(self, data: Sequence[Datum], loss: LossCall | None, backward: bool) -> ForwardOutput:
        """Score the targets of this rank's share of the data by the weights that are trained, as `forward_adapter` does
        by an adapter's; `optim_step` steps by the gradients."""
        from penstock.workers.trainer.datum_trainer import DatumTrainer

        trainer = self._parts.trainer
        if not isinstance(trainer, DatumTrainer):
            raise NotStarted("this trainer trains scores, not a policy: it takes no data with targets.")
        with self._together("forward of data"):
            return trainer.forward_data(data, loss, backward=backward)

    def create_adapter(self, name: str, spec: AdapterSpec, state: AdapterState | None = None) -> None:
        """Make an adapter, in the place of one of that name: new, or of a state."""
        with self._together(f"create adapter {name}"):
            self._adapters.create(name, spec, state)

    def drop_adapter(self, name: str) -> None:
        """Forget an adapter, if there is one of that name."""
        with self._together(f"drop adapter {name}"):
            self._adapters.drop(name)

    def forward_adapter(self, name: str, data: Sequence[Datum], loss: LossCall | None, backward: bool) -> ForwardOutput:
        """Score the targets of this rank's share of the data; with `backward` gradients of the summed loss are added to
        the adapter's. `loss` None: scores alone. Returns the log-probabilities of this rank's data in their order, and
        metrics of all ranks' data, the same on each."""
        with self._together(f"forward of adapter {name}"):
            return self._adapters.forward(name, data, loss, backward=backward)

    def step_adapter(self, name: str, params: AdamParams) -> dict[str, float]:
        """Step and clear the gradients. Returns `grad_norm` and `skipped_nonfinite`, the same on each rank."""
        with self._together(f"step of adapter {name}"):
            return self._adapters.step(name, params)

    def adapter_state(self, name: str) -> AdapterState | None:
        """The adapter's whole state on rank 0; None on the others."""
        with self._together(f"state of adapter {name}"):
            return self._adapters.state(name)

    @property
    def _adapters(self) -> "SlotTrainer":
        from penstock.workers.trainer.adapters.slot_trainer import SlotTrainer

        trainer = self._parts.trainer
        if not isinstance(trainer, SlotTrainer):
            raise NotStarted("this trainer has no slot for adapters. Give its specification a slot_rank.")
        return trainer

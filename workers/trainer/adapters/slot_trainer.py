"""A rank of a trainer that many adapters share: a frozen model with one slot (`slot.py`), and the adapters that take
turns in it (`bank.py`).

    create(name) ─▶ forward(name, data, loss, backward=True) … ─▶ step(name) ─▶ … ─▶ state(name) ─▶ drop(name)

Each call gets this rank's share of a request's data. What a request gets depends on its own data and on its adapter,
never on other requests: micro-batches are cut for it alone, and adapters are exchanged exactly.

Legend: N targets of a micro-batch, B sequences of it.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from penstock.conf.errors import ConfigError, DataError
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
from penstock.workers.trainer.adapters.bank import AdapterBank
from penstock.workers.trainer.adapters.slot import AdapterSlot
from penstock.workers.trainer.adapters.whole import WholeSlot
from penstock.workers.trainer.datum_trainer import DatumTrainer
from penstock.workers.trainer.engines.fsdp import FsdpEngine
from penstock.workers.trainer.engines.lora import ADAPTER
from penstock.workers.trainer.models.output_layer import AdaptedOutputLayer


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
    if config.engine != "fsdp":
        raise ConfigError(
            f"trainer.engine={config.engine}: adapters that take turns in a model are for trainer.engine=fsdp only. "
            "Choose that."
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

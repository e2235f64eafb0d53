"""`Trainer-<model>-<rank>`: the Ray shell around one rank. Started by `orchestrator/fleet.py`.

Light to import: whoever starts a run has this class, and torch and transformers wait until the actor is made.
"""

from collections.abc import Callable
from typing import Any

from penstock.workers.trainer.spec import TrainerSpec

CALLS = (
    "address", "start", "step", "run", "stats", "update", "logprobs", "begin_saving", "finish_saving", "load",
    "publish", "connect", "prepare", "send", "take_device", "leave_device", "export", "close",
)  # fmt: skip
"""Methods of `rank.TrainerRank`, each handed on."""


class Trainer:
    """Lifecycle: `address` on rank 0, `start` on all with it, then `step`/`publish` or `run`, then `close`."""

    def __init__(self, spec: TrainerSpec, store: Any | None) -> None:
        from penstock.workers.trainer.rank import TrainerRank

        self._rank = TrainerRank(spec, store)


def _handed_on(name: str) -> Callable[..., Any]:
    def call(self: Trainer, *arguments: Any) -> Any:
        return getattr(self._rank, name)(*arguments)

    call.__name__ = name
    return call


for _name in CALLS:
    setattr(Trainer, _name, _handed_on(_name))

"""A rank that waits for another one that dies says so, wherever it waits: then the death is what counts."""

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from penstock.conf.errors import PartnerGone, TakenOver
from penstock.store.epoch import Epoch
from penstock.workers.progress import Phases
from penstock.workers.trainer.actor import Scorer, Trainer
from penstock.workers.trainer.ranks import Ranks

RESET = RuntimeError("[gloo/transport/tcp/pair.cc:537] Read error [10.0.0.2]:1: Connection reset by peer.")


class Alone:
    """Whatever it is asked for, the other rank is gone."""

    ranks = Ranks(0, 2, torch.device("cpu"), False, timedelta(seconds=60))
    store = "a store"

    def __getattr__(self, _: str) -> Any:
        def fail(*_: Any) -> None:
            raise RESET

        return fail


def shell(cls: type) -> Any:
    made = cls.__new__(cls)
    part = Alone()
    made._phases, made._spec = Phases(), SimpleNamespace(name="Trainer-policy-0", stage="train")
    made._assembly, made._num_threads = SimpleNamespace(use_threads=lambda _: None), 1
    made._epoch = Epoch()
    made._started = SimpleNamespace(worker=part, trainer=part, state=part, kept=part)
    return made


@pytest.mark.parametrize(
    ("method", "arguments"),
    [
        ("step", (7,)),
        ("begin_saving", ("place",)),
        ("resume", ("place", [])),
        ("plan_chunks", ("node", 2)),
        ("publish", ("place", 7)),
        ("export", ("place",)),
    ],
)
def test_a_trainers_rank_names_the_end_of_another_in_every_call(method: str, arguments: tuple[Any, ...]) -> None:
    with pytest.raises(PartnerGone, match="rank 0 of 2: another rank is gone"):
        getattr(shell(Trainer), method)(*arguments)


@pytest.mark.parametrize(
    ("method", "arguments"),
    [
        ("attach", ("a store",)),
        ("step", (7, False)),
        ("begin_saving", ("place",)),
        ("restore", (7,)),
        ("publish", ("place", 7)),
    ],
)
def test_nothing_is_done_for_a_command_whose_run_another_has_taken(
    method: str, arguments: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.workers.trainer.actor.SyncStoreClient", lambda store: store)
    rank = shell(Trainer)
    with pytest.raises(PartnerGone if method in ("step", "begin_saving", "publish") else RuntimeError):
        getattr(rank, method)(*arguments, 2)
    with pytest.raises(TakenOver, match="goes on with it"):
        getattr(rank, method)(*arguments, 1)


def test_so_does_a_scorers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.workers.trainer.actor.SyncStoreClient", lambda store: store)
    with pytest.raises(PartnerGone, match="serve train, rank 0 of 2: another rank is gone"):
        shell(Scorer).run("a store")

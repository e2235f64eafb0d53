"""A rank that hangs or dies is an error in the others, by phase, rank and place; nothing waits for ever."""

import functools
import multiprocessing
import os
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from penstock.algorithms.losses import ppo_clip_loss
from penstock.conf.errors import DeadlineExceeded, PartnerGone, PenstockError, TakenOver, WorkerDied
from penstock.conf.trainer import TrainerConfig
from penstock.store.epoch import Epoch
from penstock.workers.runtime.serving import IDLE, KEEPING, PUBLISHING, UPDATING, WAITING, Phases
from penstock.workers.trainer.policy_trainer import PolicyTrainer
from penstock.workers.trainer.ranks import Meeting, Ranks, collective_error
from penstock.workers.trainer.trainer_actor import Scorer, Trainer
from tests.workers.trainer.conftest import random_rows

TIMEOUT_S = 3.0
NAMED = (
    "step", "begin_saving", "begin_keeping", "finish_keeping", "begin_publishing", "finish_publishing",
)  # fmt: skip
"""Calls whose failures are named."""
RESET = RuntimeError("[gloo/transport/tcp/pair.cc:537] Read error [10.0.0.2]:1: Connection reset by peer.")


def one_rank(rank: int, what: str, address: str, model: str, answers: Any) -> None:
    """Rank 1 does what it should not, in the middle of its second update; rank 0 says how that ends for it."""
    torch.set_num_threads(1)
    config = TrainerConfig(num_ranks=2, collective_timeout_s=TIMEOUT_S)
    trainer = PolicyTrainer(config, model, Ranks.join(config, rank, 2, address))
    rows = random_rows(6, seed=rank)
    trainer.update(rows, ppo_clip_loss)

    @functools.wraps(ppo_clip_loss)
    def loss(*tensors: Any, **columns: Any) -> Any:
        if rank == 1 and what == "sleeps":
            time.sleep(10_000)
        if rank == 1 and what == "dies":
            os._exit(1)
        return ppo_clip_loss(*tensors, **columns)

    try:
        trainer.update(rows, loss)
        answers.put((rank, None))
    except Exception as error:  # noqa: BLE001 - the test looks at which one it is
        answers.put((rank, error))


@pytest.mark.real
@pytest.mark.usefixtures("warm_spawn")
@pytest.mark.parametrize(
    ("what", "expected"),
    [pytest.param("sleeps", DeadlineExceeded, marks=pytest.mark.promise("5")), ("dies", WorkerDied)],
)
def test_a_rank_that_does_not_answer_ends_the_update_of_the_others(
    what: str, expected: type[PenstockError], model_path: str, tmp_path: Path
) -> None:
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    meeting = Meeting("127.0.0.1")
    arguments = [(rank, what, meeting.address, model_path, answers) for rank in range(2)]
    processes = [context.Process(target=one_rank, args=own, daemon=True) for own in arguments]
    for process in processes:
        process.start()
    rank, error = answers.get(timeout=900)
    for process in processes:
        process.kill()
        process.join(10)
    meeting.close()
    assert rank == 0
    assert isinstance(error, expected), repr(error)
    assert "update 2, micro-batch 1 of 1" in str(error)
    assert "rank 0 of 2" in str(error)


def test_errors_that_are_no_collectives_stay_what_they_are() -> None:
    ranks = Ranks.join(TrainerConfig(collective_timeout_s=TIMEOUT_S))
    try:
        assert collective_error(RuntimeError("mat1 and mat2 shapes cannot be multiplied"), "forward", ranks, "") is None
        assert (
            collective_error(RuntimeError("CUDA error: the launch timed out and was terminated"), "forward", ranks, "")
            is None
        )
        aborted = collective_error(RuntimeError("NCCL communicator was aborted on rank 0."), "forward", ranks, "")
        assert isinstance(aborted, PartnerGone)
        late = collective_error(
            RuntimeError("[..] Timed out waiting 3000ms for recv"), "publication", ranks, "model.layers.3"
        )
        assert isinstance(late, DeadlineExceeded)
        assert "publication, rank 0 of 1, at model.layers.3: another rank did not answer within 3 s" in str(late)
        assert isinstance(collective_error(RuntimeError("Connection closed by peer [::1]"), "x", ranks, ""), WorkerDied)
    finally:
        ranks.leave()


class LeftAlone:
    """The parts of a rank, of which every call finds the other rank gone."""

    ranks = all_ranks = Ranks(0, 2, torch.device("cpu"), False, timedelta(seconds=60))
    store = "a store"

    def __getattr__(self, _: str) -> Any:
        def fail(*_: Any) -> None:
            raise RESET

        return fail


def shell(cls: type) -> Any:
    made = cls.__new__(cls)
    part = LeftAlone()
    made._phases, made._spec = Phases(), SimpleNamespace(name="Trainer-policy-0", stage="train", phase_timeout_s=60.0)
    made._assembly, made._num_threads = SimpleNamespace(use_threads=lambda _: None), 1
    made._epoch = Epoch()
    made._started = SimpleNamespace(worker=part, trainer=part, state=part, memory_checkpoint=part)
    return made


@pytest.mark.parametrize(
    ("method", "arguments"),
    [
        ("step", (7,)),
        ("begin_saving", ("place",)),
        ("resume", ("place", [])),
        ("plan_chunks", ("node", 2)),
        ("begin_keeping", (7,)),
        ("finish_keeping", (7,)),
        ("begin_publishing", ("place", 7)),
        ("finish_publishing", (7,)),
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
        ("begin_keeping", (7,)),
        ("finish_keeping", (7,)),
        ("begin_publishing", ("place", 7)),
        ("finish_publishing", (7,)),
    ],
)
def test_nothing_is_done_for_a_command_whose_run_another_has_taken(
    method: str, arguments: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.workers.trainer.trainer_actor.SyncStoreClient", lambda store: store)
    rank = shell(Trainer)
    with pytest.raises(PartnerGone if method in NAMED else RuntimeError):
        getattr(rank, method)(*arguments, 2)
    with pytest.raises(TakenOver, match="goes on with it"):
        getattr(rank, method)(*arguments, 1)


def test_a_rank_with_nothing_else_to_do_says_that_it_publishes_or_copies() -> None:
    """So the next command waits for it, and a step that waits for its batch is not to blame."""
    rank, publisher = shell(Trainer), SimpleNamespace(seconds_under_way=3.0)
    worker = SimpleNamespace(num_rows=8, num_in_flight=0, tokens_in_flight=0)
    kept = SimpleNamespace(seconds_under_way=2.0)
    trainer = SimpleNamespace(publisher=publisher)
    rank._started = SimpleNamespace(worker=worker, trainer=trainer, memory_checkpoint=kept)
    for phase, said in ((WAITING, PUBLISHING), (UPDATING, UPDATING), (IDLE, PUBLISHING)):
        rank._phases.enter(phase)
        assert rank.progress().phase == said
    assert rank.progress().phase_s == 3.0
    publisher.seconds_under_way = None
    said = rank.progress()
    assert (said.phase, said.phase_s) == (KEEPING, 2.0)
    kept.seconds_under_way = None
    assert rank.progress().phase == IDLE


def test_so_does_a_scorers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.workers.trainer.trainer_actor.SyncStoreClient", lambda store: store)
    with pytest.raises(PartnerGone, match="serve train, rank 0 of 2: another rank is gone"):
        shell(Scorer).run("a store")

"""A rank that hangs or dies is an error in the others, by phase, rank and place; nothing waits for ever."""

import functools
import multiprocessing
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.algorithms.losses import ppo_clip_loss
from penstock.conf.errors import DeadlineExceeded, PartnerGone, PenstockError, WorkerDied
from penstock.conf.trainer import TrainerConfig
from penstock.workers.trainer.meeting import Meeting
from penstock.workers.trainer.ranks import Ranks, named
from penstock.workers.trainer.trainer import PolicyTrainer
from tests.workers.trainer.conftest import random_rows

TIMEOUT_S = 3.0


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
            time.sleep(4 * TIMEOUT_S)
        if rank == 1 and what == "dies":
            os._exit(1)
        return ppo_clip_loss(*tensors, **columns)

    start = time.monotonic()
    try:
        trainer.update(rows, loss)
        answers.put((rank, None, 0.0))
    except Exception as error:  # noqa: BLE001 - the test looks at which one it is
        answers.put((rank, error, time.monotonic() - start))


@pytest.mark.slow
@pytest.mark.usefixtures("warm_spawn")
@pytest.mark.parametrize(("what", "expected"), [("sleeps", DeadlineExceeded), ("dies", WorkerDied)])
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
    rank, error, seconds = answers.get(timeout=900)
    for process in processes:
        process.kill()
        process.join(10)
    meeting.close()
    assert rank == 0
    assert isinstance(error, expected), repr(error)
    assert "update 2, micro-batch 1 of 1" in str(error)
    assert "rank 0 of 2" in str(error)
    assert seconds < 3 * TIMEOUT_S


def test_errors_that_are_no_collectives_stay_what_they_are() -> None:
    ranks = Ranks.join(TrainerConfig(collective_timeout_s=TIMEOUT_S))
    try:
        assert named(RuntimeError("mat1 and mat2 shapes cannot be multiplied"), "forward", ranks, "") is None
        assert named(RuntimeError("CUDA error: the launch timed out and was terminated"), "forward", ranks, "") is None
        aborted = named(RuntimeError("NCCL communicator was aborted on rank 0."), "forward", ranks, "")
        assert isinstance(aborted, PartnerGone)
        late = named(RuntimeError("[..] Timed out waiting 3000ms for recv"), "publication", ranks, "model.layers.3")
        assert isinstance(late, DeadlineExceeded)
        assert "publication, rank 0 of 1, at model.layers.3: another rank did not answer within 3 s" in str(late)
        assert isinstance(named(RuntimeError("Connection closed by peer [::1]"), "x", ranks, ""), WorkerDied)
    finally:
        ranks.leave()

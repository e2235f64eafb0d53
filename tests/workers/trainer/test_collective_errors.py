"""What NCCL's watchdog prints before it ends a rank becomes the error that gloo's ranks raise themselves."""

import pickle

import pytest

from penstock.conf.errors import DeadlineExceeded, PartnerGone, WorkerDied, WorkerFailed
from penstock.orchestrator.cluster.ray_calls import is_recoverable
from penstock.workers.trainer.collective_errors import recorder_environment, watchdog_error
from tests.workers.trainer.watchdog_text import ended_by, timed_out

TEAM = ["Trainer-policy-0", "Trainer-policy-1"]


@pytest.mark.parametrize("release", ["2.4", "2.13"])
def test_a_hang_is_a_missed_deadline_that_names_who_did_not_come(release: str) -> None:
    error = watchdog_error(TEAM, {TEAM[0]: timed_out(0, 600.0, release), TEAM[1]: ["loading", "step 3"]})
    assert type(error) is DeadlineExceeded
    said = str(error)
    assert said.startswith("Trainer-policy-0: Trainer-policy-1 did not answer within 600 s (NCCL in Trainer-policy-0:")
    assert "SeqNum=5, OpType=ALLREDUCE, NumelIn=1024" in said
    assert "Raise trainer.collective_timeout_s" in said
    assert is_recoverable(error)
    assert str(pickle.loads(pickle.dumps(error))) == said


def test_where_all_ranks_have_waited_nobody_is_blamed() -> None:
    error = watchdog_error(TEAM, {name: timed_out(rank, 30.0) for rank, name in enumerate(TEAM)})
    assert str(error).startswith("Trainer-policy-0, Trainer-policy-1: another rank did not answer within 30 s")


@pytest.mark.parametrize(
    ("reason", "kind", "recoverable"),
    [
        ("NCCL error: remote process exited or there was a network error, NCCL version 2.29.7", PartnerGone, True),
        ("CUDA error: an illegal memory access was encountered", WorkerDied, True),
        ("CUDA error: device-side assert triggered", WorkerFailed, False),
        ("unknown", WorkerDied, True),
    ],
)
def test_what_else_the_watchdog_says_is_named(reason: str, kind: type[Exception], recoverable: bool) -> None:
    error = watchdog_error(TEAM, {TEAM[0]: ended_by(0, reason)})
    assert type(error) is kind
    assert reason in str(error)
    assert is_recoverable(error) == recoverable


def test_a_watchdog_that_is_stuck_itself_is_a_missed_deadline() -> None:
    line = "[PG ID 0 PG GUID 0 Rank 0] ProcessGroupNCCL's watchdog got stuck for 480 seconds without making progress"
    error = watchdog_error(TEAM, {TEAM[0]: [line]})
    assert type(error) is DeadlineExceeded
    assert "480 s" in str(error)


def test_other_last_words_are_not_the_watchdogs() -> None:
    assert (
        watchdog_error(TEAM, {TEAM[0]: ["Fatal Python error: Aborted", "terminate called without an exception"]})
        is None
    )
    assert watchdog_error(TEAM, {}) is None


def test_the_recorder_writes_where_it_is_told_under_the_names_of_all_releases() -> None:
    values = recorder_environment("/shared/run/stacks/train")
    assert values["TORCH_FR_DUMP_TEMP_FILE"] == values["TORCH_NCCL_DEBUG_INFO_TEMP_FILE"]
    assert values["TORCH_FR_DUMP_TEMP_FILE"] == "/shared/run/stacks/train/nccl_rank_"
    assert int(values["TORCH_FR_BUFFER_SIZE"]) > 0
    assert values["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "1"

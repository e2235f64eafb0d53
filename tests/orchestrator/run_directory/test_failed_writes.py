"""What could not be written is told once, counted each time, and costs nothing else."""

import errno

import pytest

from penstock.orchestrator.run_directory.failed_writes import FailedWrites


def fail(failed_writes: FailedWrites, kind: str = "samples") -> None:
    with failed_writes.tolerating(kind):
        raise OSError(errno.ENOSPC, "No space left on device")


def test_the_first_of_each_kind_is_told_and_noted_and_all_are_counted() -> None:
    noted: list[tuple[str, str]] = []
    told: list[str] = []
    failed_writes = FailedWrites(lambda kind, error: noted.append((kind, str(error))))
    failed_writes.set_printer(told.append)
    for kind in ("samples", "samples", "timeline", "samples"):
        fail(failed_writes, kind)
    reason = "[Errno 28] No space left on device"
    assert noted == [("samples", reason), ("timeline", reason)]
    assert told == [f"{kind}: cannot be written: {reason}. It is lost, and the next is tried." for kind, _ in noted]
    assert failed_writes.lost == {"samples": 3, "timeline": 1}
    assert failed_writes.metrics() == {"recording/lost": 4.0, "recording/waiting": 0.0}


def test_that_it_works_again_is_told_and_so_is_the_next_failure() -> None:
    told: list[str] = []
    failed_writes = FailedWrites(lambda kind, error: None)
    failed_writes.set_printer(told.append)
    for _ in range(2):
        fail(failed_writes)
        for _ in range(2):
            with failed_writes.tolerating("samples"):
                pass
    assert [text.partition(":")[2][:20] for text in told] == [" cannot be written: ", " can be written agai"] * 2


def test_losses_before_anybody_listened_are_told_to_the_first_listener() -> None:
    told: list[str] = []
    failed_writes = FailedWrites(lambda kind, error: None)
    fail(failed_writes)
    failed_writes.set_printer(told.append)
    failed_writes.set_printer(told.append)
    assert len(told) == 1


def test_another_error_than_the_disks_is_raised() -> None:
    failed_writes = FailedWrites(lambda kind, error: None)
    with pytest.raises(ValueError, match="a mistake"), failed_writes.tolerating("samples"):
        raise ValueError("a mistake")
    assert not failed_writes.lost

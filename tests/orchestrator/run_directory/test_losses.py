"""What could not be written is told once, counted each time, and costs nothing else."""

import errno

import pytest

from penstock.orchestrator.run_directory.losses import Losses


def fail(losses: Losses, kind: str = "samples") -> None:
    with losses.tolerating(kind):
        raise OSError(errno.ENOSPC, "No space left on device")


def test_the_first_of_each_kind_is_told_and_noted_and_all_are_counted() -> None:
    noted: list[tuple[str, str]] = []
    told: list[str] = []
    losses = Losses(lambda kind, error: noted.append((kind, str(error))))
    losses.tell_to(told.append)
    for kind in ("samples", "samples", "timeline", "samples"):
        fail(losses, kind)
    reason = "[Errno 28] No space left on device"
    assert noted == [("samples", reason), ("timeline", reason)]
    assert told == [f"{kind}: cannot be written: {reason}. It is lost, and the next is tried." for kind, _ in noted]
    assert losses.lost == {"samples": 3, "timeline": 1}
    assert losses.metrics() == {"recording/lost": 4.0, "recording/waiting": 0.0}


def test_that_it_works_again_is_told_and_so_is_the_next_failure() -> None:
    told: list[str] = []
    losses = Losses(lambda kind, error: None)
    losses.tell_to(told.append)
    for _ in range(2):
        fail(losses)
        for _ in range(2):
            with losses.tolerating("samples"):
                pass
    assert [text.partition(":")[2][:20] for text in told] == [" cannot be written: ", " can be written agai"] * 2


def test_losses_before_anybody_listened_are_told_to_the_first_listener() -> None:
    told: list[str] = []
    losses = Losses(lambda kind, error: None)
    fail(losses)
    losses.tell_to(told.append)
    losses.tell_to(told.append)
    assert len(told) == 1


def test_another_error_than_the_disks_is_raised() -> None:
    losses = Losses(lambda kind, error: None)
    with pytest.raises(ValueError, match="a mistake"), losses.tolerating("samples"):
        raise ValueError("a mistake")
    assert not losses.lost

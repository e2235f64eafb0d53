"""Failures of collectives by name: which phase, which rank, which part of the model.

torch.distributed gives every collective the ranks' deadline (`trainer.collective_timeout_s`) and reports what happens
as a bare RuntimeError. One rank that hangs or dies shows in all the others, each in the collective that it waits for.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from penstock.conf.errors import DeadlineExceeded, PartnerGone, PenstockError, is_device_failure
from penstock.workers.trainer.ranks import Ranks

LATE = ("timed out", "timeout")
LOST = (
    "connection closed", "connection reset", "connection refused", "broken pipe", "socket closed", "remote process",
    "communicator was aborted",
)  # fmt: skip


@contextmanager
def phase(name: str, ranks: Ranks, where: Callable[[], str] = str) -> Iterator[None]:
    """Name failures of collectives in the block: one that does not end in time raises `DeadlineExceeded`, and one whose
    partner is gone `PartnerGone`. `where`: the part of the model that was under way."""
    try:
        yield
    except PenstockError:
        raise
    except RuntimeError as error:
        found = named(error, name, ranks, where())
        if found is None:
            raise
        raise found from None


def named(error: RuntimeError, phase: str, ranks: Ranks, where: str) -> PenstockError | None:
    """The error under its own name; None if it is no collective's."""
    text = str(error).lower()
    place = f"{phase}, rank {ranks.rank} of {ranks.num_ranks}" + (f", at {where}" if where else "")
    last = str(error).strip().splitlines()[-1][:200]
    if any(word in text for word in LOST):
        return PartnerGone(f"{place}: another rank is gone ({last}). What ended it is in its own error.")
    if any(word in text for word in LATE) and not is_device_failure(error):  # of a kernel: "the launch timed out"
        return DeadlineExceeded(
            f"{place}: another rank did not answer within {ranks.timeout.total_seconds():g} s ({last}). Raise "
            "trainer.collective_timeout_s if it was only slow; else see what it did last."
        )
    return None

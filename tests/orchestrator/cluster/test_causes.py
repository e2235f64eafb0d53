"""A new process helps where one has died, was late or has lost its partner, and nowhere else."""

import inspect

import pytest
from ray.exceptions import (
    ActorDiedError,
    ActorUnavailableError,
    GetTimeoutError,
    ObjectLostError,
    RaySystemError,
    RayTaskError,
)

from penstock.conf import errors
from penstock.conf.errors import (
    DeadlineExceeded,
    LeaseExpired,
    PartnerGone,
    PenstockError,
    RayEnded,
    StoreDied,
    WorkerDied,
    WorkerFailed,
)
from penstock.orchestrator.cluster.ray_calls import is_recoverable, translate
from penstock.store import errors as store_errors
from penstock.store.errors import LeaseSuperseded, RowsLost, RowsUnreachable, StoreClosed, StoreUnreachable

RECOVERABLE = {
    WorkerDied, PartnerGone, DeadlineExceeded, LeaseExpired, StoreClosed, StoreUnreachable, RowsUnreachable, RowsLost,
    LeaseSuperseded, StoreDied, RayEnded,
}  # fmt: skip
ALL = {
    cls
    for module in (errors, store_errors)
    for _, cls in inspect.getmembers(module, inspect.isclass)
    if issubclass(cls, PenstockError)
}


@pytest.mark.parametrize("error_class", sorted(ALL, key=lambda cls: cls.__name__), ids=lambda cls: cls.__name__)
def test_penstocks_own_errors_of_processes_and_deadlines_are_recoverable(
    error_class: type[PenstockError],
) -> None:
    assert is_recoverable(error_class("what happened")) == (error_class in RECOVERABLE)


@pytest.mark.parametrize(
    "error",
    [
        ActorDiedError(),
        ActorUnavailableError("the connection broke", b"0" * 16),
        RaySystemError("the raylet is gone"),
        GetTimeoutError("10 s"),
        ObjectLostError("00", None, ""),
    ],
    ids=lambda error: type(error).__name__,
)
def test_what_ray_reports_is_recoverable_before_and_after_its_translation(error: Exception) -> None:
    assert is_recoverable(error)
    assert is_recoverable(translate(error, "Rollout-1"))


@pytest.mark.parametrize("error", [KeyError("reward"), ZeroDivisionError(), TypeError("a bug"), WorkerFailed("a bug")])
def test_bugs_are_not(error: Exception) -> None:
    assert not is_recoverable(error)


def test_what_an_actor_raised_is_judged_by_what_it_raised() -> None:
    def raised(cause: Exception) -> RayTaskError:
        return RayTaskError("run", "Traceback", cause)

    assert is_recoverable(raised(DeadlineExceeded("group 3")))
    assert is_recoverable(raised(ActorDiedError()))
    assert not is_recoverable(raised(KeyError("reward")))
    assert not is_recoverable(raised(errors.DataError("row 3")))

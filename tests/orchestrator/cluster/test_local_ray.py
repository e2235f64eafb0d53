"""What needs a local Ray is not waited for once that has ended. Real ones end in `runs/test_signals.py`."""

import threading
from types import SimpleNamespace

import pytest

from penstock.conf.errors import RayEnded
from penstock.orchestrator.cluster import cluster
from penstock.orchestrator.cluster.cluster import raise_if_over, while_it_lives


@pytest.fixture
def local_ray(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A local Ray of this process that has not ended."""
    local = SimpleNamespace(is_over=False)
    monkeypatch.setattr(cluster, "local_rays", {"127.0.0.1:1": local})
    return local


def test_a_call_that_hangs_is_left_when_ray_ends(local_ray: SimpleNamespace) -> None:
    answers, done = threading.Event(), threading.Event()

    def call() -> None:
        local_ray.is_over = True
        answers.wait(600)
        done.set()

    while_it_lives(call)
    assert not done.is_set()
    answers.set()
    assert done.wait(60)


def test_a_call_has_its_end_and_its_error_told(local_ray: SimpleNamespace) -> None:
    made: list[str] = []
    while_it_lives(lambda: made.append("the call"))
    assert made == ["the call"]
    with pytest.raises(ZeroDivisionError):
        while_it_lives(lambda: 1 // 0)  # type: ignore[arg-type]


def test_without_a_local_ray_a_call_is_made_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "local_rays", {})
    threads: list[threading.Thread] = []
    while_it_lives(lambda: threads.append(threading.current_thread()))
    assert threads == [threading.current_thread()]


def test_its_end_is_an_error_that_names_the_way_on(local_ray: SimpleNamespace) -> None:
    raise_if_over()
    local_ray.is_over = True
    with pytest.raises(RayEnded, match="resume=auto"):
        raise_if_over()

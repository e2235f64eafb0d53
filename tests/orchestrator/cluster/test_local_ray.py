"""What needs Ray is not waited for once that has ended. Real ones end in `runs/test_signals.py` and in
`machines/test_lost_heads.py`."""

import socket
import threading
import time
from types import SimpleNamespace

import pytest

from penstock.conf.errors import RayEnded
from penstock.orchestrator.cluster import ray_cluster, ray_connection
from penstock.orchestrator.cluster.ray_cluster import raise_if_over, while_it_lives
from penstock.orchestrator.cluster.ray_connection import NUM_LOOKS, HeadWatch


@pytest.fixture
def local_ray(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A local Ray of this process that has not ended."""
    local = SimpleNamespace(is_over=False)
    monkeypatch.setattr(ray_cluster, "local_rays", {"127.0.0.1:1": local})
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
    monkeypatch.setattr(ray_cluster, "local_rays", {})
    threads: list[threading.Thread] = []
    while_it_lives(lambda: threads.append(threading.current_thread()))
    assert threads == [threading.current_thread()]


def test_its_end_is_an_error_that_names_the_way_on(local_ray: SimpleNamespace) -> None:
    raise_if_over()
    local_ray.is_over = True
    with pytest.raises(RayEnded, match="resume=auto"):
        raise_if_over()


def test_a_head_that_takes_no_connection_any_more_ends_what_needs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    head = socket.create_server(("127.0.0.1", 0))
    watch = HeadWatch("127.0.0.1:{1}".format(*head.getsockname()), 0.2)
    monkeypatch.setattr(ray_cluster, "watches", [watch])
    for _ in range(3):
        head.accept()[0].close()
    raise_if_over()
    head.close()
    deadline = time.monotonic() + 900
    while not watch.is_lost and time.monotonic() < deadline:
        time.sleep(0.01)
    with pytest.raises(RayEnded, match=r"head .* at 127\.0\.0\.1:.* has not answered for 0\.2 s.* resume=auto"):
        raise_if_over()
    made: list[str] = []
    while_it_lives(lambda: made.append("the call"))
    assert not made


def test_a_head_that_comes_back_in_time_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    away = [*[True] * (NUM_LOOKS - 1), False] * 3
    looked = threading.Event()

    def create_connection(address: tuple[str, int], timeout_s: float) -> socket.socket:
        assert address == ("head", 6379)
        if not away:
            looked.set()
        elif away.pop():
            raise ConnectionRefusedError
        return socket.socket()

    monkeypatch.setattr(ray_connection.socket, "create_connection", create_connection)
    watch = HeadWatch("head:6379", 0.01)
    assert looked.wait(900)
    watch.close()
    watch.raise_if_lost()

"""Page-locked memory: a stand-in for CUDA's driver notes what is registered."""

import gc
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.workers.runtime import host_memory
from penstock.workers.runtime.host_memory import ALIGNMENT, HostBuffer, HostPart, page_locked, page_locked_file
from tests.amounts import amount

CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")


class Driver:
    """Stands in for `torch.cuda.cudart()`."""

    def __init__(self, code: int = 0) -> None:
        self.registered: dict[int, int] = {}
        self.events: list[str] = []
        self.code = code

    def cudaHostRegister(self, pointer: int, num_bytes: int, flags: int) -> int:  # noqa: N802 - CUDA's name
        self.registered |= {pointer: num_bytes} if self.code == 0 else {}
        return self.code

    def cudaHostUnregister(self, pointer: int) -> int:  # noqa: N802 - CUDA's name
        self.events.append("unregistered")
        del self.registered[pointer]
        return 0


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    driver = Driver()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: driver.events.append("waited"))
    yield driver
    gc.collect()
    assert not driver.registered


def test_exactly_the_bytes_that_are_asked_for_are_registered(driver: Driver) -> None:
    size = 2**20 + 3
    memory = page_locked(size, CUDA)
    assert driver.registered == {memory.data_ptr(): size}
    assert memory.shape == (size,)
    assert memory.data_ptr() % 4096 == 0
    assert not memory.any()


def test_memory_is_unregistered_after_the_last_view_of_it_and_the_devices_work(driver: Driver) -> None:
    view = page_locked(4096, CUDA)[8:16].view(torch.float32)
    gc.collect()
    assert len(driver.registered) == 1
    assert not driver.events
    del view
    gc.collect()
    assert driver.events == ["waited", "unregistered"]


def test_memory_that_the_driver_refuses_is_pageable_and_said(
    driver: Driver, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    forgotten: list[torch.device] = []
    monkeypatch.setattr(host_memory, "forget_error", forgotten.append)
    driver.code = 2
    with caplog.at_level(logging.WARNING):
        memory = page_locked(2**20, CUDA)
    assert memory.fill_(3).sum() == 3 * 2**20
    assert forgotten == [CUDA]
    assert "CUDA error 2" in caplog.text
    assert "trainer.offload=false" in caplog.text


def test_memory_for_a_device_that_is_not_cudas_is_registered_nowhere(driver: Driver) -> None:
    memory = page_locked(2**12, CPU)
    assert len(memory) == 2**12
    assert not driver.registered
    assert len(page_locked(0, CUDA)) == 0
    assert not driver.registered


def test_a_buffer_becomes_one_piece_of_the_most_bytes_that_were_out(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_memory, "BLOCK_BYTES", ALIGNMENT)
    buffer = HostBuffer(CUDA)
    sizes = [3 * ALIGNMENT, 100, 7 * ALIGNMENT]
    parts = [buffer.take(size) for size in sizes]
    assert [len(part.memory) for part in parts] == sizes
    assert len(driver.registered) == 3
    parts.clear()
    for _ in range(3):
        parts = [buffer.take(size) for size in sizes]
        assert list(driver.registered.values()) == [11 * ALIGNMENT]
        parts.clear()


def test_reserved_memory_is_one_piece_that_is_not_made_again(driver: Driver) -> None:
    buffer = HostBuffer(CUDA)
    buffer.reserve(10 * ALIGNMENT)
    (pointer,) = driver.registered
    part = buffer.take(10 * ALIGNMENT)
    with pytest.raises(RuntimeError, match="in use"):
        buffer.reserve(20 * ALIGNMENT)
    del part
    buffer.reserve(4 * ALIGNMENT)
    assert driver.registered == {pointer: 10 * ALIGNMENT}
    assert buffer.num_bytes == 10 * ALIGNMENT


@settings(max_examples=amount(100), deadline=None)
@given(st.lists(st.tuples(st.integers(1, 5000), st.integers(0, 5)), max_size=40))
def test_parts_that_are_out_share_no_byte(steps: list[tuple[int, int]]) -> None:
    buffer, held = HostBuffer(CPU), list[tuple[int, HostPart]]()
    for number, (size, dropped) in enumerate(steps):
        part = buffer.take(size)
        part.memory.fill_(number % 251)
        held.append((number % 251, part))
        del held[:dropped], part
        for value, one in held:
            assert (one.memory == value).all()


def test_a_file_is_registered_as_it_is_and_its_bytes_are_shared(driver: Driver, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(bytes(2**13 + 5))
    with file.open("r+b") as opened:
        mapping = page_locked_file(opened.fileno(), 2**13 + 5, CUDA)
        plain = page_locked_file(opened.fileno(), 2**13 + 5, CPU)
    assert list(driver.registered.values()) == [2**13 + 5]
    mapping[7] = 3
    assert file.read_bytes()[7] == plain[7] == 3
    del mapping
    gc.collect()
    assert driver.events == ["waited", "unregistered"]

"""Copies through two buffers: on a CPU the buffers are ordinary memory, and everything else is as on a device."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.workers.weights.publication import publication
from penstock.workers.weights.publication.layout import ElementRange, Outlet, compute_layout
from penstock.workers.weights.publication.publication import (
    ALIGNMENT,
    DeviceCopies,
    PlacedValues,
    PublicationWriter,
    seal,
)
from penstock.workers.weights.publication.publication_files import MappedWeights
from tests.publications import write_publication, write_rows

TENSORS = {"a": torch.arange(-500.0, 500.0) / 3, "b": torch.randn(7, 5), "scalar": torch.tensor(0.1)}
BYTES = 256


class Written:
    """What is written, copied at once as the buffers are used again."""

    def __init__(self) -> None:
        self.parts: list[tuple[str, int, list[float]]] = []
        self.batches: list[int] = []

    def write(self, parts: Sequence[PlacedValues]) -> None:
        self.batches.append(len(parts))
        self.parts += [(place.name, first, values.tolist()) for place, first, values in parts]


@given(st.lists(st.integers(0, BYTES // 2), max_size=20), st.sampled_from(["bfloat16", "float16"]))
def test_every_range_is_written_once_in_order_and_cast(sizes: list[int], dtype: str) -> None:
    place = compute_layout([("w", (10_000,), dtype)]).place("w")
    written = Written()
    copies = DeviceCopies(written.write, BYTES)
    ranges = [torch.arange(size) + 0.3 * number for number, size in enumerate(sizes)]
    for number, values in enumerate(ranges):
        copies.add(place, number, values)
    copies.finish()
    copies.finish()
    expected = [("w", number, values.to(getattr(torch, dtype)).tolist()) for number, values in enumerate(ranges)]
    assert written.parts == expected
    assert all(written.batches)


class Device:
    """Events of a device, and what happened in which order. `write`: notes that a buffer is written."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self._count = 0

    def mark(self, device: torch.device) -> "Event":
        self._count += 1
        self.log.append(f"filled {self._count}")
        return Event(f"wait {self._count}", self.log)

    def write(self, parts: Sequence[PlacedValues]) -> None:
        self.log.append("write")


class Event:
    def __init__(self, name: str, log: list[str]) -> None:
        self._name, self._log = name, log

    def synchronize(self) -> None:
        self._log.append(self._name)


def test_one_buffer_is_written_while_the_device_fills_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device()
    monkeypatch.setattr(publication, "mark", device.mark)
    place = compute_layout([("w", (10_000,), "bfloat16")]).place("w")
    copies = DeviceCopies(device.write, BYTES)
    for number in range(3):
        copies.add(place, number, torch.zeros(BYTES // 2))
    copies.finish()
    order = ["filled 1", "filled 2", "wait 1", "write", "filled 3", "wait 2", "write", "wait 3", "write"]
    assert device.log == order


def test_ranges_begin_where_any_dtype_may(monkeypatch: pytest.MonkeyPatch) -> None:
    layout, written = compute_layout([("w", (3,), "bfloat16"), ("x", (2,), "float32")]), Written()
    copies = DeviceCopies(written.write, 2 * ALIGNMENT)
    copies.add(layout.place("w"), 0, torch.tensor([1.0, 2.0, 3.0]))
    copies.add(layout.place("x"), 0, torch.tensor([4.0, 5.0]))
    copies.finish()
    assert written.parts == [("w", 0, [1.0, 2.0, 3.0]), ("x", 0, [4.0, 5.0])]
    assert written.batches == [2]


@pytest.mark.parametrize("threads", [1, 2])
def test_a_publication_through_buffers_is_the_one_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads: int
) -> None:
    plain = write_publication(tmp_path / "plain", 1, TENSORS.items(), "bfloat16")
    monkeypatch.setattr(publication, "needs_buffers", lambda values: True)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    told: list[ElementRange] = []
    layout = compute_layout((name, tuple(tensor.shape), "bfloat16") for name, tensor in TENSORS.items())
    writer = PublicationWriter(tmp_path / "buffered", 1, layout, outlet=Outlet(range_bytes=64, written=told.append))
    for name, tensor in TENSORS.items():
        write_rows(writer, name, 0, tensor)
    assert writer.finish() == sorted(told, key=lambda entry: list(TENSORS).index(entry.name) * 10**6 + entry[1])
    buffered = seal(tmp_path / "buffered", 1, layout)
    MappedWeights(buffered).verify()
    files = [Path(one.directory) / "model.safetensors" for one in (plain, buffered)]
    assert files[0].read_bytes() == files[1].read_bytes()

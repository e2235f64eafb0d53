"""What a process is told before torch is there."""

import os

import pytest

from penstock.workers.runtime.processes import (
    ALLOCATOR_SETTINGS,
    EXPANDABLE,
    SETTINGS,
    prepare_for_torch,
    use_expandable_segments,
)


def test_threads_sleep_and_pages_are_large_unless_the_user_wants_it_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in SETTINGS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    prepare_for_torch()
    assert {name: os.environ[name] for name in SETTINGS} == SETTINGS | {"OMP_WAIT_POLICY": "ACTIVE"}
    for name in SETTINGS:
        monkeypatch.delenv(name)


def test_segments_of_gpu_memory_grow_unless_the_user_has_set_the_allocator(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ALLOCATOR_SETTINGS:
        monkeypatch.delenv(name, raising=False)
    use_expandable_segments()
    assert os.environ.pop("PYTORCH_ALLOC_CONF") == EXPANDABLE == "expandable_segments:True"
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:128")
    use_expandable_segments()
    assert "PYTORCH_ALLOC_CONF" not in os.environ

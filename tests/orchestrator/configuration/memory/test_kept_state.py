"""Copies that ranks keep of their state go off by themselves where a node has no memory for them, and it is said."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from penstock.conf.errors import ConfigError, ResourceError
from penstock.orchestrator.cluster.placement.nodes import Node
from penstock.orchestrator.configuration import memory_view
from penstock.orchestrator.configuration.compose import load_config
from penstock.orchestrator.configuration.memory_view import ACCELERATOR, MemoryView, resolve_auto
from penstock.orchestrator.configuration.resolved import ResolvedRun, resolve
from penstock.orchestrator.configuration.run_memory import GIB, KEPT, host_parts
from tests.orchestrator.configuration.memory.shapes import QWEN2_7B

ROOMY, SMALL = 2000 * GIB, 250 * GIB
"""Copies of a 7B model's state are 170 GiB, and what else its run needs on a node 115."""
Run = Callable[..., ResolvedRun]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """`run(*words)`: of a 7B model on this machine's sixteen GPUs of 79 GiB."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(memory_view, "count_local_gpus", lambda: 16)
    (tmp_path / "config.json").write_text(json.dumps(QWEN2_7B))
    words = ("recipe=gsm8k", f"model.path={tmp_path}", "cluster.gpu_memory_gib=79", "trainer.num_ranks=8",
             "rollout.num_workers=8")  # fmt: skip
    return lambda *more: resolve(load_config([*words, *more]))


def has(monkeypatch: pytest.MonkeyPatch, total: float, shared: float = ROOMY) -> None:
    """Give this machine so many bytes of memory."""
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=total))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(total=shared, free=shared))


def kept(view: MemoryView) -> bool:
    assert view.memory is not None
    return KEPT in [part.name for part in host_parts(view.memory, view.plan)]


def test_copies_stay_where_they_fit_and_go_where_they_do_not(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    has(monkeypatch, ROOMY)
    assert kept(MemoryView.of(run()))
    assert "keep_state" not in MemoryView.of(run()).summary()
    for total, shared, where in ((SMALL, ROOMY, "GiB of memory beside"), (ROOMY, SMALL / 2, "GiB of /dev/shm beside")):
        has(monkeypatch, total, shared)
        view = MemoryView.of(run())
        assert not kept(view)
        assert "copies of the state are 170.2 GiB, and this machine has " in view.summary()
        assert where in view.summary()
        assert "faults.keep_state=false" in view.summary()


def test_copies_that_were_asked_for_are_refused_with_their_key(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    has(monkeypatch, SMALL)
    for look in (
        lambda: MemoryView.of(run("faults.keep_state=true")).summary(),
        lambda: resolve_auto(run("faults.keep_state=true"), [], print),
    ):
        with pytest.raises(ResourceError, match=r"170\.2 for copies of the state \(faults\.keep_state=false\)"):
            look()
    has(monkeypatch, ROOMY)
    assert kept(MemoryView.of(run("faults.keep_state=true")))
    assert not kept(MemoryView.of(run("faults.keep_state=false")))
    with pytest.raises(ConfigError, match=r"faults\.keep_state=sometimes"):
        load_config(["faults.keep_state=sometimes"])


def test_a_run_says_at_its_start_that_copies_are_off(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    for total, is_kept in ((ROOMY, True), (SMALL, False)):
        has(monkeypatch, total)
        told = list[str]()
        assert bool(resolve_auto(run(), [], told.append).config.faults.keep_state) is is_kept
        assert [line for line in told if "faults.keep_state=false" in line] == ([] if is_kept else told[-1:])


def test_the_memory_of_a_clusters_nodes_decides_there(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    has(monkeypatch, SMALL)
    monkeypatch.setattr(memory_view, "is_elsewhere", lambda: True)
    for each, is_kept in ((ROOMY, True), (SMALL, False), (0.0, True)):
        nodes = [Node(name, name, f"10.0.0.{name}", 96, 8, {ACCELERATOR: "H100"}, each) for name in ("1", "2")]
        told = list[str]()
        assert bool(resolve_auto(run(), nodes, told.append).config.faults.keep_state) is is_kept
        assert any("and 1 has " in line for line in told) is not is_kept
    small = [Node("1", "one", "10.0.0.1", 96, 16, {ACCELERATOR: "H100"}, SMALL)]
    with pytest.raises(ResourceError, match=r"one has 250\.0.*faults\.keep_state=false"):
        resolve_auto(run("faults.keep_state=true"), small, print)


def test_a_run_on_cpus_keeps_its_copies_and_says_nothing() -> None:
    told = list[str]()
    config = resolve_auto(resolve(load_config(["recipe=arithmetic"])), [], told.append).config
    assert config.faults.keep_state == "auto"
    assert told == []

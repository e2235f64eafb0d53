"""What is to survive a power cut goes through one module."""

import ast
import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.store.data import durable

ROOT = Path(__file__).parents[3]
FOLDERS = (
    "cli", "planner", "serve", "ui", "orchestrator", "workers", "store", "algorithms", "conf", "network", "metering",
    "recipes",
)  # fmt: skip
MODULE = "store/data/durable.py"
STEPS = {"fsync", "fdatasync", "sync", "rename", "renames", "replace", "link"}
OTHERS = {
    "orchestrator/cluster/ray_connection.py: link": "Ray's token, which is made again",
    "orchestrator/observability/actor_logs.py: replace": "logs of a run",
    "ui/remote.py: replace": "copies of what is at a URL",
    "store/data/segment_files.py: rename": "shared memory",
    "store/data/roots.py: rename": "directories that end with their process",
    "workers/runtime/local_files.py: replace": "files that are written again",
    "workers/node/node_transfers.py: rename": "copies that end with the run",
    "workers/sandbox/original_tree.py: rename": "trees of workspaces, which the next process unpacks again",
    "workers/weights/publication/publication_files.py: replace": "shared memory",
}
"""Steps of other modules, and why nobody misses what they write after a power cut."""


def steps_of(file: Path) -> Iterator[str]:
    """Calls that sync, rename or link files: of `os`, or a method of a path, which has one argument."""
    text = file.read_text()
    if not any(f".{step}(" in text for step in STEPS):
        return
    for node in ast.walk(ast.parse(text)):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in STEPS):
            continue
        owner, method = ast.unparse(node.func.value), node.func.attr
        is_of_path = method in ("rename", "replace") and len(node.args) == 1 and not node.keywords
        if owner == "os" or (is_of_path and owner != "durable"):
            yield f"{file.relative_to(ROOT)}: {method}"


def test_no_other_module_syncs_or_renames_what_is_to_survive() -> None:
    files = [file for folder in FOLDERS for file in (ROOT / folder).rglob("*.py")]
    found = {step for file in files for step in steps_of(file) if not step.startswith(MODULE)}
    assert found == OTHERS.keys()


def test_a_directory_that_cannot_be_synced_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(descriptor: int) -> None:
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(os, "fsync", refused)
    (tmp_path / "file").write_text("")
    durable.sync(tmp_path)
    with pytest.raises(OSError, match="Invalid argument"):
        durable.sync(tmp_path / "file")


def test_a_disk_that_fails_is_an_error_for_directories_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failed(descriptor: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", failed)
    with pytest.raises(OSError, match="Input/output error"):
        durable.sync_tree(tmp_path)

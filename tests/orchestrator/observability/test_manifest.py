"""The manifest says what decides a run's bits: code, packages, models, processors, choices."""

import json
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from penstock.orchestrator.configuration.compose import load_config
from penstock.orchestrator.observability import manifest
from penstock.orchestrator.observability.manifest import (
    DIFF,
    ManifestWriter,
    code_of,
    files_named_in,
    hashes_of_files,
    manifest_differences,
    merged,
    model_identity,
    read_manifest,
)
from penstock.orchestrator.run_directory.run_directory import RunDirectory
from penstock.workers.runtime.numerics import numerics


def git_of(tmp_path: Path, diff: str):
    """A git that knows one repository, at `tmp_path`, with these local changes."""

    def git(place: Path, *words: str) -> str | None:
        if not place.is_relative_to(tmp_path):
            return None
        said = {
            "rev-parse --show-toplevel": f"{tmp_path}\n",
            "rev-parse HEAD": "abc\n",
            " ".join((*DIFF, "HEAD")): diff,
        }
        return said[" ".join(words)]

    return git


def test_code_is_known_by_its_commit_and_its_local_changes(tmp_path):
    found, patches = code_of((tmp_path / "a", tmp_path / "b", Path("/elsewhere")), git_of(tmp_path, "+ one line\n"))
    assert list(found) == [str(tmp_path)]
    assert found[str(tmp_path)]["commit"] == "abc"
    assert patches == "+ one line\n"
    clean, _ = code_of((tmp_path,), git_of(tmp_path, ""))
    other, _ = code_of((tmp_path,), git_of(tmp_path, "+ another\n"))
    assert len({one[str(tmp_path)]["diff"] for one in (found, clean, other)}) == 3


def test_files_of_code_that_a_configuration_names_count_with_those_beside_them(tmp_path):
    (tmp_path / "mine").mkdir()
    for name in ("reward.py", "helper.py", "notes.txt"):
        (tmp_path / "mine" / name).write_text(name)
    values = {"reward": {"function": f"{tmp_path}/mine/reward.py:exact"}, "imports": [], "seed": 3, "name": "a.py:b"}
    files = files_named_in(values)
    assert {file.name for file in files} == {"reward.py", "helper.py"}
    before = hashes_of_files(files)
    (tmp_path / "mine" / "helper.py").write_text("changed")
    assert [file for file, one in hashes_of_files(files).items() if before[file] != one] == [
        str(tmp_path / "mine" / "helper.py")
    ]
    assert files_named_in({"imports": [f"{tmp_path}/mine/reward.py"]}) == files


def test_a_model_is_known_by_its_files_or_by_its_commit_on_the_hub(tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").write_bytes(b"weights")
    (model / "optimizer.pt").write_bytes(b"no part of the model")
    found = model_identity(model)
    assert found["bytes"] == 9
    (model / "optimizer.pt").write_bytes(b"another")
    assert model_identity(model) == found
    (model / "model.safetensors").write_bytes(b"weighty")
    assert model_identity(model)["hash"] != found["hash"]
    assert model_identity(model, most_bytes=8) == {"bytes": 9}
    snapshot = tmp_path / "hub" / "snapshots" / "0123abcd"
    snapshot.mkdir(parents=True)
    assert model_identity(snapshot) == {"commit": "0123abcd"}


def test_a_value_that_differs_between_processes_is_a_list():
    assert merged([{"gpu": "H100"}, {"cpu": "EPYC"}, {"gpu": "H100"}]) == {"gpu": ["H100", None], "cpu": ["EPYC", None]}


def test_a_process_says_what_decides_its_bits(monkeypatch):
    monkeypatch.setenv("OMP_DYNAMIC", "false")
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    found = numerics("sdpa")
    assert {"cpu", "libraries", "deterministic", "onednn", "attention"} < found.keys()
    assert found["variables"]["OMP_DYNAMIC"] == "false"
    assert "secret" not in json.dumps(found)


@pytest.mark.parametrize("text", ["", "[1]", "{"])
def test_what_is_no_manifest_is_an_empty_one(tmp_path, text):
    (tmp_path / "manifest.json").write_text(text)
    assert read_manifest(tmp_path) == read_manifest(tmp_path / "none") == {}


def test_the_name_and_the_place_of_a_run_are_no_difference():
    first = {"config": {"name": "a", "output_dir": "b", "seed": 0}}
    second = {"config": {"name": "c", "output_dir": "d", "seed": 1}}
    assert manifest_differences({"x": first, "y": second}) == {"config.seed": {"x": 0, "y": 1}}


def write(directory: RunDirectory, model: Path, *words: str) -> None:
    """Write the manifest of a run whose actors say nothing, and wait for all of it."""
    actor = SimpleNamespace(name="Rollout-0", role="rollout")
    fleet: Any = MagicMock(plan=[actor], flow=SimpleNamespace(stages=[]))
    fleet.reservation.assignment.titles, fleet.threads_of.return_value = {"Rollout-0": "here"}, 2
    fleet.role.return_value = []
    with ManifestWriter(fleet, load_config(["recipe=arithmetic", *words]), str(model), directory).writing():
        pass
    for thread in threading.enumerate():
        if thread.name == "manifest":
            thread.join(60)


@pytest.fixture
def directory(tmp_path, monkeypatch):
    """The directory of a run outside of any repository."""
    monkeypatch.setattr(manifest.subprocess, "run", lambda *_, **__: SimpleNamespace(returncode=128, stdout=b""))
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model.safetensors").write_bytes(b"weights")
    (tmp_path / "run").mkdir()
    return RunDirectory(tmp_path / "run")


def test_a_run_keeps_its_first_manifest_and_notes_what_has_changed_since(directory, tmp_path):
    write(directory, tmp_path / "model")
    first = read_manifest(directory.path)
    assert first["chosen"] == {"threads": {"Rollout-0": 2}, "nodes": {"Rollout-0": "here"}, "dataflow": []}
    assert first["config"]["recipe"] == "arithmetic"
    write(directory, tmp_path / "model")
    assert not directory.read_events()
    (tmp_path / "model" / "model.safetensors").write_bytes(b"weighty")
    write(directory, tmp_path / "model", "seed=3")
    assert read_manifest(directory.path) == first
    (event,) = directory.read_events()
    assert event["kind"] == "manifest_changed"
    assert event["differing"]["config.seed"] == {"before": 0, "now": 3}
    assert event["differing"].keys() == {"config.seed", "models.policy.hash"}


def test_the_hash_of_a_large_model_comes_later(directory, tmp_path, monkeypatch):
    monkeypatch.setattr(manifest, "MOST_HASHED", 6)
    seen, made = [], manifest.model_identity
    monkeypatch.setattr(
        manifest, "model_identity", lambda *given: seen.append(read_manifest(directory.path)) or made(*given)
    )
    write(directory, tmp_path / "model")
    assert seen[0] == {}
    assert seen[1]["models"] == {"policy": {"bytes": 7}}
    assert read_manifest(directory.path)["models"]["policy"] == made(tmp_path / "model")


def test_a_manifest_that_cannot_be_made_is_an_event_and_the_run_goes_on(directory, tmp_path):
    (tmp_path / "model" / "model.safetensors").unlink()
    (tmp_path / "model" / "model.safetensors.index.json").write_text("no index")
    write(directory, tmp_path / "model")
    (event,) = directory.read_events()
    assert (event["kind"], event["what"]) == ("recording_failed", "manifest")
    assert read_manifest(directory.path) == {}

"""A node fetches a hub's model once, whole and of one revision, or says why not."""

import json
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub.errors import DryRunError
from huggingface_hub.file_download import DryRunFileInfo

from penstock.conf.errors import ResourceError
from penstock.workers.models.model_files import files_of_model
from penstock.workers.node.hub_models import HubModels, cached_revision, may_be_hub_id

COMMIT, NAME = "0123456789abcdef0123456789abcdef01234567", "people/model"
INDEX = json.dumps({"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}})
FILES = {
    "config.json": b"{}", "tokenizer.json": b"{}", "model.safetensors.index.json": INDEX.encode(),
    "model-00001-of-00002.safetensors": b"1" * 10_000, "model-00002-of-00002.safetensors": b"2" * 10_000,
    "consolidated.safetensors": b"3" * 20_000, "original/params.json": b"{}", "pytorch_model.bin": b"4" * 20_000,
}  # fmt: skip
MODEL = {name for name in FILES if name.startswith(("config", "tokenizer", "model"))}


class Hub:
    """Stands where the hub and its client do: the client's signature, and the layout of its cache."""

    def __init__(self, cache: Path, files: dict[str, bytes]) -> None:
        self.files, self.is_there = files, True
        self.asked: list[tuple[str | None, list[str] | None]] = []
        self.folder = cache / "models--people--model"
        self.snapshot = self.folder / "snapshots" / COMMIT
        self.while_fetching: Any = lambda: None

    def snapshot_download(
        self, name: str, *, revision: str | None = None, allow_patterns: list[str] | None = None,
        local_files_only: bool = False, dry_run: bool = False,
    ) -> Any:  # fmt: skip
        if dry_run:
            if not self.is_there:
                raise DryRunError("cannot") from OSError("401 Client Error: this model is gated\nmore")
            return [
                DryRunFileInfo(COMMIT, len(data), name, str(self.snapshot / name), self._has(name), not self._has(name))
                for name, data in self.files.items()
            ]
        if local_files_only:
            if not self.snapshot.is_dir():
                raise FileNotFoundError("Cannot find an appropriate cached snapshot folder")
            return str(self.snapshot)
        self.asked.append((revision, allow_patterns))
        (self.folder / "blobs").mkdir(parents=True, exist_ok=True)
        self.snapshot.mkdir(parents=True, exist_ok=True)
        for file in allow_patterns or []:
            (self.folder / "blobs" / file).write_bytes(self.files[file])
            self.while_fetching()
            (self.snapshot / file).unlink(missing_ok=True)
            (self.snapshot / file).symlink_to(self.folder / "blobs" / file)
        return str(self.snapshot)

    def _has(self, name: str) -> bool:
        return (self.snapshot / name).exists()


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    made = Hub(tmp_path, dict(FILES))
    monkeypatch.setattr("huggingface_hub.snapshot_download", made.snapshot_download)
    return made


def test_a_model_is_fetched_whole_without_other_forms_of_its_weights(hub: Hub) -> None:
    seen, models = [], HubModels()
    hub.while_fetching = lambda: seen.append(models.fetched())
    assert models.fetch(NAME, None) == str(hub.snapshot)
    assert {path.name for path in hub.snapshot.iterdir()} == MODEL
    assert [revision for revision, _ in hub.asked] == [COMMIT], "that of the files which were counted"
    missing = sum(len(FILES[name]) for name in MODEL)
    assert {total for _, total in seen} == {missing}
    assert [come for come, _ in seen] == sorted(come for come, _ in seen)
    assert 0 < seen[-1][0] <= missing
    assert models.fetched() == (0, 0)


def test_a_model_without_room_is_refused_before_a_byte_comes(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda place: type("Usage", (), {"free": 1_000})())
    with pytest.raises(ResourceError, match=r"bytes are missing, and .* has room for 1,000 \(HF_HOME"):
        HubModels().fetch(NAME, None)
    assert not hub.asked


def test_without_the_hub_the_cache_has_to_do(hub: Hub) -> None:
    HubModels().fetch(NAME, None)
    hub.is_there = False
    assert HubModels().fetch(NAME, COMMIT) == str(hub.snapshot)
    (hub.snapshot / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ResourceError, match=r"gated \(cache: .* lacks model-00002-of-00002.safetensors\).*HF_TOKEN"):
        HubModels().fetch(NAME, COMMIT)


def test_a_repository_without_weights_is_refused(hub: Hub) -> None:
    hub.files = {"config.json": b"{}", "adapter_model.safetensors": b"1"}
    with pytest.raises(ResourceError, match="lacks its weights"):
        HubModels().fetch(NAME, None)


def test_files_of_a_model_are_those_that_a_directory_would_have() -> None:
    assert set(files_of_model(FILES)) == MODEL
    assert files_of_model(["config.json", "pytorch_model.bin", "model.gguf"]) == ["config.json", "pytorch_model.bin"]
    assert files_of_model(["a.jinja", "additional_chat_templates/tools.jinja", "x/config.json"]) == [
        "a.jinja", "additional_chat_templates/tools.jinja",
    ]  # fmt: skip


def test_all_nodes_take_the_revision_of_the_drivers_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tmp_path / "models--people--model" / "snapshots" / COMMIT / "config.json"
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda name, file: str(config))
    assert cached_revision(NAME) == COMMIT
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda name, file: None)
    assert cached_revision(NAME) is None


@pytest.mark.parametrize(
    ("path", "may"),
    [(NAME, True), ("gpt2", True), ("/gone", False), ("~/gone", False), ("./a", False), ("a/b/c", False)],
)
def test_a_path_that_is_gone_is_no_model_of_the_hub(path: str, may: bool) -> None:
    assert may_be_hub_id(path) == may

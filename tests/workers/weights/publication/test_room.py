"""Room for publications: what a model's files say, and what each node needs."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from penstock.workers.weights.publication.costs import (
    how_to_enlarge,
    node_bytes,
    publication_bytes,
    state_copy_bytes,
    stored_elements,
)


def test_elements_are_those_of_the_files_that_the_index_names(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(3, 5), "b": torch.zeros(())}, tmp_path / "one.safetensors")
    save_file({"c": torch.zeros(7)}, tmp_path / "two.safetensors")
    save_file({"all": torch.zeros(23)}, tmp_path / "consolidated.safetensors")
    names = {"a": "one.safetensors", "b": "one.safetensors", "c": "two.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    assert stored_elements(tmp_path) == 3 * 5 + 1 + 7


def test_a_whole_model_counts_without_the_other_files_beside_it(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(3, 5)}, tmp_path / "model.safetensors")
    save_file({"a": torch.zeros(3, 5)}, tmp_path / "consolidated.safetensors")
    assert stored_elements(tmp_path) == 15


def test_a_model_of_the_hub_counts_once_it_is_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No network is asked: `snapshot_download` finds the newest commit that the cache knows of."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert stored_elements("of/the-hub") is None
    cached = tmp_path / "models--of--the-hub"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text("abc")
    (cached / "snapshots" / "abc").mkdir(parents=True)
    save_file({"a": torch.zeros(3, 5)}, cached / "snapshots" / "abc" / "model.safetensors")
    assert stored_elements("of/the-hub") == 15


@pytest.mark.parametrize("damage", [b"", b"\xff" * 20, b"\x02" + bytes(7) + b"[]"])
def test_what_is_not_here_or_cannot_be_read_has_no_number(tmp_path: Path, damage: bytes) -> None:
    assert stored_elements(tmp_path) is None
    assert stored_elements("Qwen/of-the-hub") is None
    (tmp_path / "model.safetensors").write_bytes(damage)
    assert stored_elements(tmp_path) is None


def test_a_7b_model_takes_two_times_15_gb_and_its_copies_183_gb() -> None:
    size = publication_bytes(7_615_616_512, "bfloat16")
    assert size == 15_231_233_024
    assert node_bytes(size, 0, 8, 2) == 30_462_466_048
    assert state_copy_bytes(7_615_616_512) == 182_774_796_288


def test_a_node_with_ranks_alone_needs_what_they_write() -> None:
    assert node_bytes(1000, 3, 4, 0) == 2 * 750
    assert node_bytes(1000, 4, 4, 0) == node_bytes(1000, 4, 4, 2)


def test_the_advice_names_the_setting_of_each_kind_of_container() -> None:
    advice = how_to_enlarge(30_462_466_048)
    assert "--shm-size=29g" in advice
    assert "sizeLimit: 29Gi" in advice
    assert "medium: Memory" in advice

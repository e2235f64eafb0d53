"""What counts as a model's file in directories as people have them."""

import json
import os
from pathlib import Path

import pytest

from penstock.workers.models.model_files import copy_texts, model_files, text_files, weight_files
from penstock.workers.runtime.local_files import staged_directory

MODEL = {
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "tokenizer.model", "qwen.tiktoken", "tekken.json", "vocab.json", "vocab.txt", "merges.txt", "chat_template.jinja",
    "chat_template.json", "preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json",
    "modeling_mine.py", "LICENSE", "NOTICE.txt", "additional_chat_templates/tool_use.jinja",
}  # fmt: skip
OTHERS = {
    "README.md", "train.json", "rows.jsonl", "requirements.txt", "adapter_config.json", "adapter_model.safetensors",
    "trainer_state.json", "optimizer.pt", "training_args.bin", "model.gguf", "consolidated.safetensors",
    ".git/lfs/objects/aa/bb", ".cache/huggingface/x.json", "onnx/model.onnx", "onnx/config.json", "runs/a/config.json",
    "checkpoint-500/model.safetensors", "checkpoint-500/config.json", "additional_chat_templates/notes.md",
}  # fmt: skip


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    for name in MODEL | OTHERS:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    return tmp_path


def test_a_models_files_are_told_from_what_lies_beside_them(clone: Path) -> None:
    assert {*text_files(clone)} == MODEL
    assert weight_files(clone) == []


def test_links_count_as_what_they_lead_to_and_pipes_and_loose_links_do_not(clone: Path, tmp_path: Path) -> None:
    (clone / "blob").write_text("{}")
    (clone / "added_tokens.json").symlink_to(clone / "blob")
    (clone / "params.json").symlink_to(clone / "gone")
    os.mkfifo(clone / "vocab.fifo")
    assert {*text_files(clone)} == MODEL | {"added_tokens.json"}


def test_weights_are_the_files_that_transformers_reads(clone: Path) -> None:
    index = {"metadata": {}, "weight_map": {"a": "pytorch_model-1.bin", "b": "pytorch_model-2.bin"}}
    (clone / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    of_index = ["pytorch_model.bin.index.json", "pytorch_model-1.bin", "pytorch_model-2.bin"]
    assert weight_files(clone) == of_index
    (clone / "model.safetensors").write_text("")
    assert weight_files(clone) == ["model.safetensors"]
    assert {*model_files(clone)} == MODEL | {"model.safetensors"}
    (clone / "model.safetensors").unlink()
    (clone / "pytorch_model.bin.index.json").write_text("[]")
    with pytest.raises(ValueError, match="index of weights without a weight_map"):
        weight_files(clone)


def test_a_copy_into_a_folder_of_the_source_ends(clone: Path) -> None:
    copy_texts(clone, clone / "runs" / "a" / "model")
    assert {*text_files(clone / "runs" / "a" / "model")} == MODEL
    assert not (clone / "runs" / "a" / "model" / "runs").exists()


@pytest.mark.parametrize("is_there", [False, True])
def test_a_directory_is_filled_whole_or_not_at_all(tmp_path: Path, is_there: bool) -> None:
    target = tmp_path / "model"
    if is_there:
        target.mkdir()
        (target / "mine").write_text("mine")
        (target / "config.json").write_text("old")

    def fill(fails: bool) -> None:
        with staged_directory(target) as part:
            (part / "adapter").mkdir()
            (part / "adapter" / "config.json").write_text("new")
            (part / "config.json").write_text("new")
            if fails:
                raise OSError

    with pytest.raises(OSError):  # noqa: PT011 - the test's own
        fill(fails=True)
    assert [*tmp_path.iterdir()] == ([target] if is_there else [])
    if is_there:
        assert (target / "config.json").read_text() == "old"
    fill(fails=False)
    names = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()}
    assert names == {"model/config.json", "model/adapter/config.json"} | ({"model/mine"} if is_there else set())
    assert (target / "config.json").read_text() == "new"

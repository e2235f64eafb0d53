"""A HF model of what was trained, by one rank. By several: `several_ranks/`."""

import ast
import json
import math
import os
import shutil
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from penstock.algorithms.losses import sft_loss
from penstock.conf.errors import ModelError, WeightError
from penstock.store.data.rows import Rows
from penstock.workers.models.model_files import INDEX, check_exported, model_files
from penstock.workers.trainer.assembly import assemble_trainer
from penstock.workers.trainer.policy_trainer import PolicyTrainer
from penstock.workers.trainer.publishing import plan_files
from penstock.workers.weights.piece import Piece
from tests.model_files import load_model
from tests.small_files import files_up_to
from tests.tmpfs import run_in_tmpfs
from tests.workers.trainer.conftest import ENGINES
from tests.workers.trainer.test_assembly import trainer_spec

Make = Callable[..., PolicyTrainer]


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> str:
    return request.param


def test_an_exported_model_loads_with_equal_logits_and_its_tokenizer(
    make_trainer: Make, make_rows: Callable[..., Rows], weights_of: Callable[..., Any], model_path: str, tmp_path: Path
) -> None:
    trainer = make_trainer(lr=1e-2)
    trainer.update(make_rows(4), sft_loss)
    written = trainer.export(str(tmp_path / "model"))
    assert written == {"model.safetensors": (tmp_path / "model" / "model.safetensors").stat().st_size}
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    expected = AutoModelForCausalLM.from_pretrained(model_path)
    expected.load_state_dict(weights_of(trainer), strict=False)
    ids = torch.randint(3, 90, (3, 11))
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, expected(ids).logits)
    assert AutoTokenizer.from_pretrained(tmp_path / "model").decode(loaded.config.eos_token_id) == "<eos>"
    assert not [path.name for path in (tmp_path / "model").iterdir() if path.name.startswith(".")]


def test_an_export_in_bfloat16_says_so_and_can_be_trained_on(
    make_trainer: Make, make_rows: Callable[..., Rows], tmp_path: Path
) -> None:
    make_trainer(engine_dtype="bfloat16").export(str(tmp_path))
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"
    assert make_trainer(path=str(tmp_path)).update(make_rows(4), sft_loss).num_samples == 4


def as_users_have_it(model_path: str, place: Path) -> Path:
    """The model with settings that transformers reads and refuses to write, and with what lies beside a model."""
    for name in model_files(Path(model_path)):
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(Path(model_path, name), place / name)
    for name, more in (("generation_config.json", {"temperature": 0.6}), ("config.json", {"temperature": 0.7})):
        values = json.loads((place / name).read_text()) | more
        (place / name).write_text(json.dumps(values))
    for name in (".git/lfs/big", "onnx/model.onnx", "checkpoint-5/model.safetensors", "data.json", "README.md"):
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_text("beside")
    (place / "additional_chat_templates").mkdir()
    (place / "additional_chat_templates" / "tools.jinja").write_text("{{ messages }}")
    (place / "vocab.txt").symlink_to(place / "gone")
    os.mkfifo(place / "vocab.fifo")
    return place


def test_an_export_has_the_files_of_a_model_as_they_are_and_no_others(
    make_trainer: Make, model_path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(as_users_have_it(model_path, tmp_path))
    trainer = make_trainer(".")
    trainer.try_export()
    trainer.export("runs/a/model")
    names = {path.relative_to("runs/a/model").as_posix() for path in Path("runs/a/model").rglob("*") if path.is_file()}
    assert names == {*model_files(Path(model_path)), "additional_chat_templates/tools.jinja"}
    assert json.loads(Path("runs/a/model/generation_config.json").read_text())["temperature"] == 0.6
    assert AutoModelForCausalLM.from_pretrained("runs/a/model").generation_config.temperature == 0.6


def test_what_could_not_be_exported_is_told_before_anything_is_trained(model_path: str, tmp_path: Path) -> None:
    """A file whose name is a model's, and which is there, and cannot be read."""
    place = as_users_have_it(model_path, tmp_path)
    (place / "tokenizer.model").symlink_to("/proc/self/mem")
    with pytest.raises(ModelError, match=r"could not be exported after the training: .*Input/output error.* Mend"):
        assemble_trainer(trainer_spec(str(place)), None)


def test_the_file_is_what_the_library_writes(make_trainer: Make, model_path: str, tmp_path: Path) -> None:
    make_trainer().export(str(tmp_path))
    tensors = load_file(Path(model_path) / "model.safetensors")
    expected = safetensors.torch.save(tensors, metadata={"format": "pt"})
    assert (tmp_path / "model.safetensors").read_bytes() == expected


def test_nothing_of_an_earlier_export_by_more_ranks_stays(make_trainer: Make, tmp_path: Path) -> None:
    for name in ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", INDEX):
        (tmp_path / name).write_text("old")
    make_trainer().export(str(tmp_path))
    load_model(tmp_path)


def test_a_tensor_is_let_go_of_before_the_one_after_the_next_is_asked_for(make_trainer: Make, tmp_path: Path) -> None:
    trainer, alive = make_trainer(), []

    def pieces() -> Iterator[Piece]:
        for piece in whole():
            copy = replace(piece, values=piece.values.clone())
            alive.append(weakref.ref(copy.values))
            assert sum(reference() is not None for reference in alive) <= 2
            yield copy

    whole, trainer.engine.pieces = trainer.engine.pieces, pieces
    trainer.export(str(tmp_path))
    assert len(alive) > 40


def test_a_file_that_cannot_be_written_is_named(make_trainer: Make, tmp_path: Path) -> None:
    (tmp_path / ".model.safetensors.part").mkdir()
    with pytest.raises(WeightError, match=r"export to .*: rank 0 could not write model\.safetensors: .*directory"):
        make_trainer().export(str(tmp_path))


@pytest.mark.parametrize("blocked", [None, "config.json"])
def test_an_export_that_cannot_be_written_leaves_nothing_of_its_weights(
    make_trainer: Make, tmp_path: Path, blocked: str | None
) -> None:
    trainer, what = make_trainer(), "config, tokenizer, index or adapter" if blocked else "model.safetensors"
    if blocked:
        (tmp_path / blocked).mkdir()
    with files_up_to(-1 if blocked else 20_000), pytest.raises(WeightError, match=f"rank 0 could not write {what}: "):
        trainer.export(str(tmp_path))
    assert not list(tmp_path.glob(".*"))
    shutil.rmtree(tmp_path / "config.json", ignore_errors=True)
    trainer.export(str(tmp_path))
    load_model(tmp_path)


SMALL_TMPFS = """
import shutil, sys
from pathlib import Path
from penstock.conf.errors import ModelError, WeightError
from penstock.conf.trainer import TrainerConfig
from penstock.workers.trainer.policy_trainer import PolicyTrainer

place = Path(sys.argv[1])
trainer = PolicyTrainer(TrainerConfig(), MODEL)
(place / "ballast").write_bytes(bytes(shutil.disk_usage(place).free - 40_960))
try:
    trainer.export(str(place / "model"))
except WeightError as error:
    print(error)
print(list((place / "model").iterdir()))
(place / "ballast").unlink()
print(trainer.export(str(place / "model")))
"""


@pytest.mark.real
def test_an_export_to_a_full_disk_says_what_it_needs_and_what_was_free(
    model_path: str, tmp_path: Path, warm_python: list[str]
) -> None:
    script = SMALL_TMPFS.replace("MODEL", repr(model_path))
    error, left, written = run_in_tmpfs(script, tmp_path, "above, without the room", warm_python).splitlines()[-3:]
    needed = ast.literal_eval(written)["model.safetensors"]
    assert error.startswith(f"export to {tmp_path}/model: rank 0 could not write model.safetensors: [Errno 28] ")
    assert f"Its part alone needs {needed:,} bytes, and 40,960 were free. Make room, or make the model of a " in error
    assert left == "[]"


@given(st.lists(st.lists(st.integers(0, 9), max_size=3), min_size=1, max_size=20), st.integers(1, 6))
def test_ranks_get_about_the_same_bytes(shapes: list[list[int]], num_ranks: int) -> None:
    plan = plan_files({f"t{number}": (tuple(shape), "bfloat16") for number, shape in enumerate(shapes)}, num_ranks)
    loads = [sum(place.num_bytes for place in plan.layout(rank).tensors) for rank in range(num_ranks)]
    sizes = [2 * math.prod(shape) for shape in shapes]
    assert sum(loads) == sum(sizes)
    assert max(loads) - min(loads) <= max(sizes)
    assert sorted(json.loads(plan.index())["weight_map"]) == sorted(plan.tensors)
    if len(plan.names) > 1:
        assert list(plan.names.values())[-1] == f"model-{len(plan.names):05d}-of-{len(plan.names):05d}.safetensors"
    else:
        assert list(plan.names.values()) == ["model.safetensors"]


def test_files_that_the_driver_does_not_see_are_named_and_old_ones_go(tmp_path: Path) -> None:
    written = [{"model-00001-of-00002.safetensors": 3, INDEX: 5}, {"model-00002-of-00002.safetensors": 4}]
    for name, num_bytes in {**written[0], "model.safetensors": 1, "config.json": 2}.items():
        (tmp_path / name).write_bytes(bytes(num_bytes))
    with pytest.raises(WeightError, match=r"model-00002-of-00002\.safetensors is missing as this machine sees it"):
        check_exported(str(tmp_path), written)
    (tmp_path / "model-00002-of-00002.safetensors").write_bytes(bytes(3))
    with pytest.raises(WeightError, match="has 3 bytes instead of 4 as this machine"):
        check_exported(str(tmp_path), written)
    (tmp_path / "model-00002-of-00002.safetensors").write_bytes(bytes(4))
    check_exported(str(tmp_path), written)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*written[0], *written[1], "config.json"])

"""A trainer of a model that sees: log-probabilities of rows with pictures, and what an update changes."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penstock.algorithms.losses import ppo_clip_loss
from penstock.conf.errors import DataError
from penstock.conf.trainer import LoraConfig
from penstock.store.data.rows import Rows
from penstock.workers.pictures.processor import FAMILIES, PictureProcessor
from penstock.workers.trainer.models import vision
from penstock.workers.trainer.models.vision import FrozenTower
from tests.rank_processes import ROOT
from tests.workers.trainer.seeing import PAD, MadeUp, rows_with, save_model

PROMPTS = [["a 4 6"], [], ["b 8 4", "a 4 6"], ["a 4 6"]]
WAYS: dict[str, dict[str, Any]] = {
    "padded": {}, "packed": {"packing": "always"}, "in several micro-batches": {"max_tokens_per_microbatch": 40},
}  # fmt: skip
Make = Callable[..., Any]
EACH = pytest.mark.parametrize("seeing_path", ["qwen2_5_vl", "qwen3_vl", "llava"], indirect=True)


@pytest.fixture(scope="module", params=["qwen2_5_vl"])
def seeing_path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model(request.param, tmp_path_factory.mktemp("seeing"))


@pytest.fixture
def make(make_trainer: Make, seeing_path: str) -> Make:
    def made(**options: Any) -> Any:
        trainer = make_trainer(seeing_path, **options)
        trainer.attach_vision(MadeUp(trainer.model.lm.config))
        return trainer

    return made


@pytest.fixture
def engine() -> str:
    return "fsdp"


def own_logprobs(path: str, rows: Rows) -> list[np.ndarray]:
    """By the model's own forward of each row alone, with the positions that it finds itself."""
    from transformers import AutoModelForImageTextToText

    lm, found = AutoModelForImageTextToText.from_pretrained(path), []
    eyes, family = MadeUp(lm.config), FAMILIES[lm.config.model_type]
    for number, (prompt, response) in enumerate(zip(rows.lists("prompt_ids"), rows.lists("response_ids"), strict=True)):
        ids = torch.tensor([prompt + response])
        seen: dict[str, Any] = {}
        if pictures := [eyes.read(one) for one in rows.blobs("pictures")[number]]:
            pixels = torch.from_numpy(np.concatenate([one.pixels_PC for one in pictures]))
            seen = family.inputs(pixels, torch.tensor([one.grid for one in pictures]))
            seen |= {"mm_token_type_ids": (ids == PAD).int()} if family.has_grids else {}
        lm.base_model.rope_deltas = None
        with torch.no_grad():
            logits = lm(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False, **seen).logits[0]
        logits[:, eyes.token_ids] = -torch.inf  # as engines sample
        found.append(logits.log_softmax(-1)[len(prompt) - 1 : -1][range(len(response)), response].numpy())
    return found


@EACH
@pytest.mark.parametrize("way", WAYS)
def test_logprobs_of_rows_with_pictures_are_the_models_own(make: Make, seeing_path: str, way: str) -> None:
    trainer = make(**WAYS[way])
    rows = rows_with(PROMPTS, kind=trainer.model.lm.config.model_type)
    trainer.check_scores()
    for ours, own in zip(trainer.logprobs(rows), own_logprobs(seeing_path, rows), strict=True):
        np.testing.assert_allclose(ours, own, atol=1e-5)


@EACH
@pytest.mark.parametrize(
    ("options", "changes"),
    [({}, {"text"}), ({"freeze": []}, {"text", "tower"}), ({"lora": LoraConfig(rank=4)}, {"text"})],
    ids=["frozen", "all of it", "adapters"],
)
def test_an_update_changes_the_tower_only_where_it_is_asked_to(
    make: Make, weights_of: Callable[[Any], dict[str, torch.Tensor]], options: dict[str, Any], changes: set[str]
) -> None:
    trainer = make(lr=1e-2, **options)
    before = weights_of(trainer)
    kind = trainer.model.lm.config.model_type
    trainer.update(rows_with(PROMPTS, kind=kind), ppo_clip_loss)
    after = weights_of(trainer)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    tower = {*FAMILIES[kind].tower}
    assert {"tower" if tower & {*name.split(".")} else "text" for name in changed} == changes


def test_a_picture_with_another_number_of_features_than_placeholders_is_refused(make: Make) -> None:
    rows = rows_with([["a 4 6"]]).with_column("pictures", [[b"a 4 4"]])
    with pytest.raises(DataError, match="6 placeholders in its prompt, and 4 features"):
        make().logprobs(rows)


def test_a_frozen_tower_sees_each_picture_once_whatever_the_passes(make: Make) -> None:
    """Two pictures, in three rows, in four passes and two updates; and what is computed with them stays the same."""
    rows, trainer = rows_with(PROMPTS), make(max_tokens_per_microbatch=40, num_minibatches=2)
    before = trainer.logprobs(rows)
    with watched(trainer) as passes:
        again = trainer.logprobs(rows)
        trainer.update(rows, ppo_clip_loss)
    assert passes == []
    for ours, own in zip(again, before, strict=True):
        np.testing.assert_array_equal(ours, own)
    with watched(trainer) as passes:
        trainer.logprobs(rows_with([["c 4 4"], ["a 4 6", "c 4 4"], []]))
    assert passes == [[[1, 4, 4]]]


def test_a_tower_that_is_trained_sees_pictures_anew(make: Make, tmp_path: Path) -> None:
    """Whatever was kept of what it saw before would be far off."""
    rows, trainer = rows_with(PROMPTS), make(freeze=[], lr=1e-2)
    kept = MadeUp(trainer.model.lm.config)
    nothing, forward = torch.zeros(0, dtype=torch.int64), trainer.engine.forward
    see = lambda pictures: forward(None, nothing, nothing, "none", None, None, False, pictures)[0]  # noqa: E731
    kept.cache_features(FrozenTower(see, trainer.engine.free, trainer.ranks))
    kept.prepare(rows)
    trainer.update(rows, ppo_clip_loss)
    trainer.export(str(tmp_path))
    own = np.concatenate(own_logprobs(str(tmp_path), rows))
    gap = np.abs(np.concatenate(trainer.logprobs(rows)) - own).mean()
    trainer.attach_vision(kept)
    mutant = np.abs(np.concatenate(trainer.logprobs(rows)) - own).mean()
    assert gap < 1e-5
    assert mutant > 100 * max(gap, 1e-7)


HUB = """
import sys
from pathlib import Path
from penstock.conf.trainer import TrainerConfig
from penstock.workers.trainer.policy_trainer import PolicyTrainer
trainer = PolicyTrainer(TrainerConfig(), sys.argv[1])
trainer.export(sys.argv[2])
trainer.close()
"""


@pytest.mark.real
@pytest.mark.parametrize("place", ["directory", "hub"])
def test_an_exported_model_sees_as_the_one_that_was_trained(
    make_trainer: Make, vision_model: Path, tmp_path: Path, place: str
) -> None:
    """It has what makes pixels of pictures, and the chat template that has places for them, wherever it came from."""
    from transformers import AutoModelForImageTextToText, AutoProcessor

    exported = tmp_path / "exported"
    if place == "directory":
        make_trainer(str(vision_model)).export(str(exported))
    else:  # the hub's cache is known when a process starts
        cached = tmp_path / "hub" / "models--someone--seeing"
        shutil.copytree(vision_model, cached / "snapshots" / "abc")
        (cached / "refs").mkdir()
        (cached / "refs" / "main").write_text("abc")
        offline = {"HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1"}
        command = [sys.executable, "-c", HUB, "someone/seeing", exported]
        subprocess.run(command, check=True, env=os.environ | offline, cwd=ROOT)
    assert PictureProcessor.of(str(exported)).digest == PictureProcessor.of(str(vision_model)).digest
    before, after = (AutoProcessor.from_pretrained(one) for one in (vision_model, exported))
    assert after.chat_template == before.chat_template
    assert after.tokenizer.get_vocab() == before.tokenizer.get_vocab()
    before, after = (AutoModelForImageTextToText.from_pretrained(one).state_dict() for one in (vision_model, exported))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_microbatches_are_cut_by_what_a_trained_tower_computes(make: Make) -> None:
    """Four rows of a picture, which all fit where its features are known, and go alone where the tower runs."""
    rows = rows_with([["a 8 8"]] * 4)
    largest = []
    for freeze in (["vision"], []):
        trainer, sizes = make(freeze=freeze, max_tokens_per_microbatch=128), list[int]()
        trainer.model.register_forward_pre_hook(lambda _, read, sizes=sizes: sizes.append(len(read[1])))
        trainer.logprobs(rows)
        largest.append(max(sizes))
    lengths = rows.lengths("response_ids")
    assert largest == [lengths.sum(), lengths.max()]


def test_what_is_kept_of_pictures_is_bounded_but_for_the_rows_at_hand(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vision, "REMEMBERED_BYTES", 0)
    rows, trainer = rows_with(PROMPTS), make()
    first = trainer.logprobs(rows)
    with watched(trainer) as passes:
        for ours, own in zip(trainer.logprobs(rows), first, strict=True):
            np.testing.assert_array_equal(ours, own)
        trainer.logprobs(rows_with([["c 4 4"]]))
        trainer.logprobs(rows_with([["a 4 6"]]))
    assert passes == [[[1, 4, 4]], [[1, 4, 6]]]


@contextmanager
def watched(trainer: Any) -> Iterator[list[Any]]:
    """The grids of what the tower is called with."""
    calls: list[Any] = []

    def note(module: Any, arguments: Any, keywords: Any) -> None:
        calls.append(keywords["grid_thw"].tolist())

    hook = trainer.model.lm.base_model.visual.register_forward_pre_hook(note, with_kwargs=True)
    yield calls
    hook.remove()

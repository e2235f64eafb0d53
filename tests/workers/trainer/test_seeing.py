"""A trainer of a model that sees: log-probabilities of rows with pictures, and what an update changes."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from penstock.algorithms.losses import ppo_clip_loss
from penstock.conf.errors import ConfigError, DataError
from penstock.conf.trainer import LoraConfig
from penstock.store.data.rows import Rows
from penstock.workers.pictures.families import FAMILIES
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
        trainer.see(MadeUp(trainer.model.lm.config))
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
        if pictures := [eyes.see(one) for one in rows.blobs("pictures")[number]]:
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


def test_a_model_that_sees_is_not_split_in_ways_that_are_not_known(make_trainer: Make, seeing_path: str) -> None:
    with pytest.raises(ConfigError, match=r"trainer\.engine: a model that sees"):
        make_trainer(seeing_path, engine="deepspeed")

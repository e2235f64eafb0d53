"""A model that sees, as the trainer calls it, against the model's own forward: the same numbers, and other ones as soon
as a picture is dropped, swapped or turned."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from penstock.conf.run import RunConfig
from penstock.orchestrator.observability.diagnosis import History, mismatch
from penstock.workers.pictures.processor import FAMILIES
from penstock.workers.trainer.models import packed_attention
from penstock.workers.trainer.models.language_model import PolicyModel
from penstock.workers.trainer.models.vision import blank_picture, freeze_tower, tower_cost, vision_tower
from penstock.workers.trainer.update.picture_places import Pictures, PlacedPicture, num_tokens, place
from penstock.workers.trainer.update.token_layout import Blocks
from tests.workers.trainer.seeing import PAD, merge_of, model_that_sees, picture

GAP = 1e-5


@pytest.fixture(scope="module", params=FAMILIES)
def lm(request: pytest.FixtureRequest) -> Any:
    return model_that_sees(request.param)


ROWS: dict[str, list[tuple[int, str, int, int]]] = {
    "none": [], "one": [(4, "a", 4, 6)], "two": [(2, "b", 8, 4), (3, "a", 4, 6)]
}  # fmt: skip
"""Pictures of a row, each after so many tokens of text: key, height and width in patches."""
Row = tuple[list[int], list[PlacedPicture]]


def row_of(lm: Any, name: str, seed: int = 0) -> Row:
    kind, random, ids, placed = lm.config.model_type, np.random.RandomState(seed), list[int](), list[PlacedPicture]()
    for text, key, height, width in ROWS[name]:
        ids += random.randint(7, 128, text).tolist()
        placed.append(PlacedPicture(picture(key, height, width, kind), len(ids)))
        ids += [PAD] * num_tokens(placed[-1].picture.grid, merge_of(kind))
    return ids + random.randint(7, 128, 9).tolist(), placed


def own_logprobs(lm: Any, ids: list[int], placed: list[PlacedPicture]) -> Tensor:
    """By the model's own forward, with its own positions."""
    ids_1L, family = torch.tensor([ids]), FAMILIES[lm.config.model_type]
    seen = {}
    if placed:
        pixels = torch.from_numpy(np.concatenate([one.picture.pixels_PC for one in placed]))
        seen = family.inputs(pixels, torch.tensor([one.picture.grid for one in placed]))
        seen |= {"mm_token_type_ids": (ids_1L == PAD).int()} if family.has_grids else {}
    lm.base_model.rope_deltas = None
    logits_LV = lm(input_ids=ids_1L, attention_mask=torch.ones_like(ids_1L), use_cache=False, **seen).logits[0]
    return torch.log_softmax(logits_LV[:-1], -1).gather(1, ids_1L[0, 1:, None]).squeeze(1)


def batch_of(lm: Any, rows: list[Row], packed: bool = False) -> tuple[Tensor, Tensor, Tensor, Pictures]:
    """Ids, places and targets of all tokens but the first of each row, and the pictures."""
    lengths = np.array([len(ids) for ids, _ in rows])
    width = int(lengths.sum() if packed else lengths.max())
    starts = np.cumsum(lengths) - lengths if packed else np.arange(len(rows)) * width
    shape = (1 if packed else len(rows), width)
    flat = np.zeros(shape[0] * width, np.int64)
    for (ids, _), start in zip(rows, starts.tolist(), strict=True):
        flat[start : start + len(ids)] = ids
    at = np.concatenate([start + np.arange(1, length) for start, length in zip(starts, lengths, strict=True)])
    merge, blank = merge_of(lm.config.model_type), blank_picture(lm.config)
    pictures = place([placed for _, placed in rows], lengths, starts, shape, merge, blank)
    return torch.from_numpy(flat).view(shape), torch.from_numpy(at - 1), torch.from_numpy(flat[at]), pictures


def gap_of(lm: Any, rows: list[Row], change: Any = lambda pictures: pictures) -> float:
    """Mean difference of log-probabilities in a padded micro-batch from the model's own of each row alone."""
    ids, positions, targets, pictures = batch_of(lm, rows)
    with torch.no_grad():
        ours, _ = PolicyModel(lm)(ids, positions, targets, pictures=change(pictures))
        own = torch.cat([own_logprobs(lm, *row) for row in rows])
    return float((ours - own).abs().mean())


@pytest.mark.parametrize("names", [["none"], ["one"], ["two"], ["two", "none", "one", "two"]], ids="-".join)
def test_what_the_trainer_computes_is_what_the_model_does_alone(lm: Any, names: list[str]) -> None:
    assert gap_of(lm, [row_of(lm, name, seed) for seed, name in enumerate(names)]) < GAP


MUTANTS: dict[str, Any] = {
    "a dropped picture": lambda seen: replace(seen, places_F=seen.places_F[:-6], sources_F=seen.sources_F[:-6]),
    "swapped pictures": lambda seen: replace(seen, sources_F=seen.sources_F.flip(0)),
    "flat positions": lambda seen: replace(seen, position_ids_3SL=seen.position_ids_3SL[:1].expand(3, -1, -1)),
    "counted positions": lambda seen: replace(
        seen, position_ids_3SL=torch.arange(seen.position_ids_3SL.shape[2]).expand(seen.position_ids_3SL.shape)
    ),
    "padded on the other side": lambda seen: replace(seen, position_ids_3SL=seen.position_ids_3SL.roll(3, -1)),
    "a shifted grid": lambda seen: replace(seen, grids_K3=seen.grids_K3[:, [0, 2, 1]]),
}
OF_GRIDS = ("counted positions", "a shifted grid")
"""Those of families whose positions are not counted, and whose tower is told a grid."""


@pytest.mark.parametrize(
    ("lm", "mutant"),
    [(kind, name) for kind, of in FAMILIES.items() for name in MUTANTS if of.has_grids or name not in OF_GRIDS],
    indirect=["lm"],
)
def test_what_is_done_wrongly_with_pictures_shows(lm: Any, mutant: str) -> None:
    rows = [row_of(lm, "two")]
    right, wrong = gap_of(lm, rows), gap_of(lm, rows, MUTANTS[mutant])
    assert wrong > 100 * max(right, 1e-7)
    assert not warned_of(right)
    assert warned_of(wrong)


def warned_of(gap: float) -> bool:
    """Return whether a synchronous run in float32 warns where trainer and engine differ by so much in each step."""
    history = History(window=2)
    for _ in range(2):
        history.add({"mismatch/logprob_abs_mean": gap})
    return mismatch(history, RunConfig(max_staleness=0).diagnosis_of_run, 0) is not None


@pytest.mark.parametrize("order", [[], [1], [1, 0]], ids=["none", "one", "swapped"])
def test_features_that_go_to_the_wrong_layers_show(order: list[int]) -> None:
    lm = model_that_sees("qwen3_vl")
    ids, placed = row_of(lm, "two")
    told, positions, targets, pictures = batch_of(lm, [(ids, placed)])
    with torch.no_grad():
        own, tower = own_logprobs(lm, ids, placed), lm.base_model.visual
        tower.deepstack_visual_indexes = order
        ours, _ = PolicyModel(lm)(told, positions, targets, pictures=pictures)
    assert float((ours - own).abs().mean()) > 100 * GAP


def test_a_placeholder_that_the_policy_has_written_is_text(lm: Any) -> None:
    """It takes no feature, so that the ones of pictures stay where they are."""
    ids, placed = row_of(lm, "one")
    ids[-3] = PAD
    told, positions, targets, pictures = batch_of(lm, [(ids, placed)])
    plain, _ = row_of(lm, "one")
    with torch.no_grad():
        ours, _ = PolicyModel(lm)(told, positions, targets, pictures=pictures)
        own = own_logprobs(lm, plain, placed)
    assert torch.allclose(ours[: len(ids) - 4], own[: len(ids) - 4], atol=GAP)


def test_packed_rows_see_their_own_pictures(lm: Any) -> None:
    rows = [row_of(lm, name, seed) for seed, name in enumerate(("two", "one", "none"))]
    ids, positions, targets, pictures = batch_of(lm, rows, packed=True)
    assert packed_attention.choose(lm, "always")
    try:
        with torch.no_grad():
            blocks = Blocks.of([len(row) for row, _ in rows])
            ours, _ = PolicyModel(lm)(ids, positions, targets, blocks=blocks, pictures=pictures)
    finally:
        packed_attention.text_model(lm).set_attn_implementation("sdpa")
    with torch.no_grad():
        own = torch.cat([own_logprobs(lm, *row) for row in rows])
    assert float((ours - own).abs().mean()) < GAP


def gradients(lm: Any, name: str) -> dict[str, Tensor]:
    """The gradients of the tower's parameters, for a row with these pictures."""
    ids, positions, targets, pictures = batch_of(lm, [row_of(lm, name)])
    logprobs, _ = PolicyModel(lm)(ids, positions, targets, pictures=pictures)
    logprobs.sum().backward()
    found = {
        f"{number}.{key}": parameter.grad
        for number, module in enumerate(vision_tower(lm))
        for key, parameter in module.named_parameters()
        if parameter.grad is not None
    }
    lm.zero_grad(set_to_none=True)
    return found


def test_a_blank_picture_has_the_tower_run_and_changes_nothing(lm: Any) -> None:
    """Its gradients are there and zero, as peers of a sharded tower wait for them."""
    blank, shown = gradients(lm, "none"), gradients(lm, "two")
    assert blank.keys() == shown.keys()
    assert not any(gradient.any() for gradient in blank.values())
    assert all(gradient.isfinite().all() for gradient in blank.values())
    assert sum(bool(gradient.any()) for gradient in shown.values()) > len(shown) / 2


def test_a_frozen_tower_gets_no_gradient_and_the_text_does(lm: Any) -> None:
    count = freeze_tower(lm)
    ids, positions, targets, pictures = batch_of(lm, [row_of(lm, "two")])
    logprobs, _ = PolicyModel(lm)(ids, positions, targets, pictures=pictures)
    logprobs.sum().backward()
    tower = [parameter for module in vision_tower(lm) for parameter in module.parameters()]
    assert count == sum(parameter.numel() for parameter in tower) > 0
    assert all(parameter.grad is None for parameter in tower)
    assert lm.get_input_embeddings().weight.grad is not None
    lm.requires_grad_(True)
    lm.zero_grad(set_to_none=True)


def test_a_picture_weighs_what_its_patches_and_those_that_they_attend_to_cost() -> None:
    """A tower of two blocks of which one attends within windows of 4 x 4 patches, 32 wide: 24 patches attend to 16 in
    one and to 24 in the other."""
    lm = model_that_sees("qwen2_5_vl")
    of_tower = sum(parameter.numel() for parameter in lm.model.visual.parameters())
    of_text = sum(parameter.numel() for parameter in lm.model.language_model.layers.parameters())
    assert tower_cost(lm)((1, 4, 6)) == math.ceil(24 * (of_tower + 2 * 32 * (16 + 24)) / of_text)
    assert tower_cost(lm)((1, 40, 60)) > 100 * tower_cost(lm)((1, 4, 6))

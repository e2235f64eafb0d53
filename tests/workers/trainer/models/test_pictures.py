"""A model that sees, as the trainer calls it, against the model's own forward: the same numbers, and other ones as soon
as a picture is dropped, swapped or turned."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from penstock.conf.run import RunConfig
from penstock.orchestrator.observability.diagnosis.history import History
from penstock.orchestrator.observability.diagnosis.rules import mismatch
from penstock.workers.trainer.models import packed_attention
from penstock.workers.trainer.models.language_model import PolicyModel
from penstock.workers.trainer.models.pictures import blank_picture, freeze_tower
from penstock.workers.trainer.update.blocks import Blocks
from penstock.workers.trainer.update.pictures import Picture, Pictures, Placed, num_tokens, place
from tests.workers.trainer.seeing import MERGE, PAD, model_that_sees, picture

GAP = 1e-5


@pytest.fixture(scope="module", params=["qwen2_5_vl", "qwen2_vl"])
def lm(request: pytest.FixtureRequest) -> Any:
    return model_that_sees(request.param)


A, B = picture("a", 4, 6), picture("b", 8, 4)
ROWS: dict[str, list[tuple[int, Picture]]] = {"none": [], "one": [(4, A)], "two": [(2, B), (3, A)]}
"""Pictures of a row, each after so many tokens of text."""


def row_of(parts: list[tuple[int, Picture]], seed: int) -> tuple[list[int], list[Placed]]:
    random, ids, placed = np.random.RandomState(seed), list[int](), list[Placed]()
    for text, one in parts:
        ids += random.randint(7, 128, text).tolist()
        placed.append(Placed(one, len(ids)))
        ids += [PAD] * num_tokens(one.grid, MERGE)
    return ids + random.randint(7, 128, 9).tolist(), placed


def own_logprobs(lm: Any, ids: list[int], placed: list[Placed]) -> Tensor:
    """By the model's own forward, with its own positions."""
    ids_1L = torch.tensor([ids])
    seen = {}
    if placed:
        seen = {
            "pixel_values": torch.from_numpy(np.concatenate([one.picture.pixels_PC for one in placed])),
            "image_grid_thw": torch.tensor([one.picture.grid for one in placed]),
            "mm_token_type_ids": (ids_1L == PAD).int(),
        }
    lm.base_model.rope_deltas = None
    logits_LV = lm(input_ids=ids_1L, attention_mask=torch.ones_like(ids_1L), use_cache=False, **seen).logits[0]
    return torch.log_softmax(logits_LV[:-1], -1).gather(1, ids_1L[0, 1:, None]).squeeze(1)


def batch_of(
    lm: Any, rows: list[tuple[list[int], list[Placed]]], packed: bool = False
) -> tuple[Tensor, Tensor, Tensor, Pictures]:
    """Ids, places and targets of all tokens but the first of each row, and the pictures."""
    lengths = np.array([len(ids) for ids, _ in rows])
    width = int(lengths.sum() if packed else lengths.max())
    starts = np.cumsum(lengths) - lengths if packed else np.arange(len(rows)) * width
    shape = (1 if packed else len(rows), width)
    flat = np.zeros(shape[0] * width, np.int64)
    for (ids, _), start in zip(rows, starts.tolist(), strict=True):
        flat[start : start + len(ids)] = ids
    at = np.concatenate([start + np.arange(1, length) for start, length in zip(starts, lengths, strict=True)])
    pictures = place([placed for _, placed in rows], lengths, starts, shape, MERGE, blank_picture(lm.config))
    return torch.from_numpy(flat).view(shape), torch.from_numpy(at - 1), torch.from_numpy(flat[at]), pictures


def gap_of(lm: Any, rows: list[tuple[list[int], list[Placed]]], change: Any = lambda pictures: pictures) -> float:
    """Mean difference of log-probabilities in a padded micro-batch from the model's own of each row alone."""
    ids, positions, targets, pictures = batch_of(lm, rows)
    with torch.no_grad():
        ours, _ = PolicyModel(lm)(ids, positions, targets, pictures=change(pictures))
        own = torch.cat([own_logprobs(lm, *row) for row in rows])
    return float((ours - own).abs().mean())


@pytest.mark.parametrize("names", [["none"], ["one"], ["two"], ["two", "none", "one", "two"]], ids="-".join)
def test_what_the_trainer_computes_is_what_the_model_does_alone(lm: Any, names: list[str]) -> None:
    assert gap_of(lm, [row_of(ROWS[name], seed) for seed, name in enumerate(names)]) < GAP


MUTANTS: dict[str, Any] = {
    "a dropped picture": lambda seen: replace(seen, places_F=seen.places_F[:-6], sources_F=seen.sources_F[:-6]),
    "swapped pictures": lambda seen: replace(seen, sources_F=seen.sources_F.flip(0)),
    "flat positions": lambda seen: replace(seen, position_ids_3SL=seen.position_ids_3SL[:1].expand(3, -1, -1)),
    "counted positions": lambda seen: replace(
        seen, position_ids_3SL=torch.arange(seen.position_ids_3SL.shape[2]).expand(seen.position_ids_3SL.shape)
    ),
    "a shifted grid": lambda seen: replace(seen, grids_K3=seen.grids_K3[:, [0, 2, 1]]),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_what_is_done_wrongly_with_pictures_shows(lm: Any, mutant: str) -> None:
    rows = [row_of(ROWS["two"], 0)]
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


def test_a_placeholder_that_the_policy_has_written_is_text(lm: Any) -> None:
    """It takes no feature, so that the ones of pictures stay where they are."""
    ids, placed = row_of(ROWS["one"], 0)
    ids[-3] = PAD
    told, positions, targets, pictures = batch_of(lm, [(ids, placed)])
    plain, _ = row_of(ROWS["one"], 0)
    with torch.no_grad():
        ours, _ = PolicyModel(lm)(told, positions, targets, pictures=pictures)
        own = own_logprobs(lm, plain, placed)
    assert torch.allclose(ours[: len(ids) - 4], own[: len(ids) - 4], atol=GAP)


def test_packed_rows_see_their_own_pictures(lm: Any) -> None:
    rows = [row_of(ROWS[name], seed) for seed, name in enumerate(("two", "one", "none"))]
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


def test_a_blank_picture_has_the_tower_run_and_changes_nothing(lm: Any) -> None:
    """Its gradients are there and zero, as peers of a sharded tower wait for them."""
    model = PolicyModel(lm)
    ids, positions, targets, pictures = batch_of(lm, [row_of(ROWS["none"], 0)])
    logprobs, _ = model(ids, positions, targets, pictures=pictures)
    logprobs.sum().backward()
    tower = [parameter.grad for parameter in lm.base_model.visual.parameters()]
    assert all(gradient is not None and not gradient.any() for gradient in tower)
    lm.zero_grad(set_to_none=True)


def test_a_frozen_tower_gets_no_gradient_and_the_text_does(lm: Any) -> None:
    count = freeze_tower(lm)
    ids, positions, targets, pictures = batch_of(lm, [row_of(ROWS["two"], 0)])
    logprobs, _ = PolicyModel(lm)(ids, positions, targets, pictures=pictures)
    logprobs.sum().backward()
    assert count == sum(parameter.numel() for parameter in lm.base_model.visual.parameters())
    assert all(parameter.grad is None for parameter in lm.base_model.visual.parameters())
    assert lm.get_input_embeddings().weight.grad is not None
    lm.requires_grad_(True)
    lm.zero_grad(set_to_none=True)

"""The likeliest tokens of each place, and an update by their log-probabilities, against whole logits."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from penstock.algorithms.aggregation import BatchTotals
from penstock.algorithms.builtin.imitation import divergence_loss
from penstock.conf.errors import DataError, DataflowError
from penstock.store.data.rows import Rows
from penstock.workers.trainer.policy_trainer import PolicyTrainer
from penstock.workers.trainer.update import batching
from tests.workers.trainer.conftest import ENGINES, copy_of_weights
from tests.workers.trainer.test_packing import LINEAR, assert_near

Make = Callable[..., PolicyTrainer]
COUNT = 3


@pytest.fixture
def engine(request: pytest.FixtureRequest) -> str:
    return getattr(request, "param", "fsdp")


def whole_logprobs(model_path: str, rows: Rows) -> tuple[Any, batching.MicroBatch, Tensor]:
    """The model, the rows as a micro-batch, and log-probabilities of all words at its response tokens, `[N, V]`."""
    lm = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32, attn_implementation="sdpa").train()
    batch = batching.collate(rows, np.arange(len(rows)))
    hidden = lm.model(input_ids=batch.input_ids_SL, use_cache=False).last_hidden_state
    logits = lm.lm_head(hidden.flatten(0, 1).index_select(0, batch.positions_N))
    return lm, batch, torch.log_softmax(logits, dim=-1)


def with_candidates(make_trainer: Make, rows: Rows) -> Rows:
    """Candidates of the model itself, whose teacher is another one."""
    _, ids, logprobs = make_trainer().candidates(rows, COUNT)
    teacher = [np.sort(values * 1.5)[::-1].astype(np.float32) for values in logprobs]
    return rows.with_column("candidate_ids", ids).with_column("teacher_candidates", teacher)


@pytest.mark.parametrize("options", [{}, {"packing": "always"}, {"logprob_chunk_mib": 0.0001}], ids=str)
def test_candidates_are_the_likeliest_tokens(
    make_trainer: Make, make_rows: Callable[..., Rows], model_path: str, options: dict[str, Any]
) -> None:
    rows = make_rows(6)
    _, batch, logprobs_NV = whole_logprobs(model_path, rows)
    best_NJ, ids_NJ = logprobs_NV.topk(COUNT, dim=-1)
    own, ids, logprobs = make_trainer(max_tokens_per_microbatch=60, **options).candidates(rows, COUNT)
    lengths = rows.lengths("response_ids")
    assert [len(part) for part in ids] == [len(part) for part in logprobs] == (COUNT * lengths).tolist()
    assert {part.dtype for part in ids} == {np.dtype(np.int32)}
    np.testing.assert_array_equal(np.concatenate(ids), ids_NJ.flatten())
    np.testing.assert_allclose(np.concatenate(logprobs), best_NJ.detach().flatten(), atol=1e-5)
    targets = logprobs_NV.gather(1, batch.targets_N[:, None]).detach().flatten()
    np.testing.assert_allclose(np.concatenate(own), targets, atol=1e-5)


@pytest.mark.parametrize(
    ("engine", "options"),
    [*((engine, {}) for engine in ENGINES), ("fsdp", {"packing": "always"}), ("fsdp", {"share_prefixes": "always"})],
    indirect=["engine"],
)
@pytest.mark.parametrize("divergence", ["forward_kl", "reverse_kl"])
def test_an_update_is_that_of_whole_logits(
    make_trainer: Make, make_rows: Callable[..., Rows], model_path: str, options: dict[str, Any], divergence: str
) -> None:
    rows = with_candidates(make_trainer, make_rows(8))
    lm, batch, logprobs_NV = whole_logprobs(model_path, rows)
    ids = batching.collate(rows, np.arange(len(rows)), ["candidate_ids", "teacher_candidates"])
    assert ids.candidates_NJ is not None
    loss, _ = divergence_loss(
        batch.scatter(logprobs_NV.gather(1, ids.candidates_NJ)), batch.mask_BT, BatchTotals.of(batch.mask_BT),
        ids.columns["teacher_candidates"], divergence=divergence,
    )  # fmt: skip
    loss.backward()
    expected = {}
    for name, parameter in lm.named_parameters():
        assert parameter.grad is not None
        expected[name] = (parameter - parameter.grad / (parameter.grad.abs() + 1)).detach()
    trainer = make_trainer(max_tokens_per_microbatch=60, **LINEAR, **options)
    metrics = trainer.update(rows, partial(divergence_loss, divergence=divergence)).metrics
    assert metrics["actor/loss"] == pytest.approx(float(loss.detach()), rel=1e-4)
    found = copy_of_weights(trainer)
    assert_near(
        {name: found[name] for name in expected if name in found}, {n: expected[n] for n in expected if n in found}
    )


def test_rows_without_candidates_and_ragged_ones_are_refused(
    make_trainer: Make, make_rows: Callable[..., Rows]
) -> None:
    rows, trainer = make_rows(4), make_trainer()
    with pytest.raises(DataflowError, match="reads column 'candidate_ids'"):
        trainer.update(rows, divergence_loss)
    rows = with_candidates(make_trainer, rows)
    ids = rows.arrays("candidate_ids")
    ids[0] = ids[0][:-1]
    with pytest.raises(DataError, match="column 'candidate_ids' has"):
        trainer.update(rows.with_column("candidate_ids", ids), divergence_loss)

"""One rank. More of them: `test_ranks.py`."""

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoModelForCausalLM

from penstock.algorithms.aggregation import BatchTotals
from penstock.algorithms.losses import ppo_clip_loss, sft_loss
from penstock.conf.errors import DataError, DataflowError, ModelError
from penstock.conf.trainer import TrainerConfig
from penstock.store.data.rows import Rows
from penstock.workers.protocols import Trainer
from penstock.workers.trainer.policy_trainer import PolicyTrainer
from penstock.workers.trainer.ranks import Ranks
from penstock.workers.trainer.token_recorder import TokenRecorder
from penstock.workers.trainer.update import batching
from penstock.workers.trainer.update.sequences import TEMPERATURES
from tests.workers.trainer.conftest import ENGINES

Make = Callable[..., PolicyTrainer]
MakeRows = Callable[..., Rows]
Weights = Callable[[PolicyTrainer], dict[str, Tensor]]
LINEAR = {"lr": 1.0, "eps": 1.0, "betas": [0.0, 0.0], "clip_norm": 0.0}
"""AdamW whose step is -g / (|g| + 1): weights after one update show the gradient."""


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> str:
    return request.param


def plain_loop(model_path: str, steps: list[Rows], lr: float, epochs: int = 1) -> dict[str, Tensor]:
    """The loop that a reader would write: HF model, whole logits, AdamW, clip_grad_norm_. `epochs`: passes over each
    batch, with the log-probabilities of the first as the old ones (`num_iterations` of TRL, `ppo_epochs` of verl)."""
    lm = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32, attn_implementation="sdpa").train()
    optimizer = torch.optim.AdamW(lm.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    old_logprobs = torch.zeros(0)
    for rows, epoch in itertools.product(steps, range(epochs)):
        batch = batching.collate(rows, np.arange(len(rows)), ["advantage", "behavior_logprobs"])
        hidden = lm.model(input_ids=batch.input_ids_SL, use_cache=False).last_hidden_state
        logits = lm.lm_head(hidden.flatten(0, 1).index_select(0, batch.positions_N))
        logprobs = torch.log_softmax(logits, dim=-1).gather(1, batch.targets_N[:, None]).squeeze(1)
        logprobs = batch.scatter(logprobs)
        old_logprobs = old_logprobs if epoch else logprobs.detach()
        loss, _ = ppo_clip_loss(
            logprobs, batch.mask_BT, BatchTotals.of(batch.mask_BT), old_logprobs=old_logprobs, **batch.columns
        )
        loss.backward()
        torch.nn.utils.clip_grad_norm_(lm.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return {name: parameter.detach() for name, parameter in lm.named_parameters()}


def test_three_updates_are_those_of_a_plain_loop_and_bitwise_with_fsdp(
    make_trainer: Make, make_rows: MakeRows, weights_of: Weights, model_path: str, engine: str
) -> None:
    steps = [make_rows(8, seed=seed, same_length=True) for seed in range(3)]
    trainer = make_trainer(lr=1e-3)
    for rows in steps:
        trainer.update(rows, ppo_clip_loss)
    for name, expected in plain_loop(model_path, steps, 1e-3).items():
        # DeepSpeed sums the norm's squares in another order, and AdamW divides by the square root of what is left of a
        # gradient near 0: a thousandth of what three updates of lr 1e-3 move.
        tolerance = 0 if engine == "fsdp" else 3e-6
        torch.testing.assert_close(weights_of(trainer)[name], expected, atol=tolerance, rtol=0, msg=name)


def test_a_rank_is_a_trainer(make_trainer: Make) -> None:
    trainer: Trainer = make_trainer()
    assert trainer.publish


def test_trainers_come_and_go_in_a_process_whoever_made_its_process_group(make_trainer: Make) -> None:
    """DeepSpeed keeps groups of the first one for the whole process."""
    for _ in range(2):
        ranks = Ranks.join(TrainerConfig())
        trainer = make_trainer()
        trainer.close()
        ranks.leave()
        assert not dist.is_initialized()
    own = make_trainer()
    own.close()
    assert not dist.is_initialized()


def test_a_trainer_that_cannot_be_made_is_no_rank(make_trainer: Make) -> None:
    with pytest.raises(ModelError):
        make_trainer("/no/such/model")
    assert not dist.is_initialized()


def test_logprobs_are_the_models_own_in_the_order_of_rows(
    make_trainer: Make, make_rows: MakeRows, model_path: str
) -> None:
    rows = make_rows(9)
    lm = AutoModelForCausalLM.from_pretrained(model_path)
    logprobs = make_trainer(temperature=0.5, max_tokens_per_microbatch=40).logprobs(rows)
    for prompt, response, ours in zip(rows.lists("prompt_ids"), rows.lists("response_ids"), logprobs, strict=True):
        with torch.no_grad():
            logits = lm(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1] / 0.5
        expected = logits.log_softmax(-1)[range(len(response)), response]
        assert ours.dtype == np.float32
        np.testing.assert_allclose(ours, expected.numpy(), atol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_logprobs_are_at_the_temperature_that_each_token_was_sampled_at(
    make_trainer: Make, make_rows: MakeRows, dtype: str, engine: str
) -> None:
    """Also where all of a micro-batch were sampled at another one than the run's."""
    rows = make_rows(4, same_length=True)
    lengths = rows.lengths("response_ids")
    cold = [np.full(length, 0.7, np.float32) for length in lengths]
    mixed = [np.where(np.arange(length) % 2, 0.7, 1.3).astype(np.float32) for length in lengths]
    trainer = make_trainer(temperature=1.3, dtype=dtype)
    at_13 = trainer.logprobs(rows)
    at_07 = make_trainer(temperature=0.7, dtype=dtype).logprobs(rows)
    found = trainer.logprobs(rows.with_column(TEMPERATURES, mixed))
    for ours, low, high in zip(found, at_07, at_13, strict=True):
        np.testing.assert_allclose(ours, np.where(np.arange(len(ours)) % 2, low, high), atol=1e-5)
    for ours, low in zip(trainer.logprobs(rows.with_column(TEMPERATURES, cold)), at_07, strict=True):
        np.testing.assert_allclose(ours, low, atol=1e-5)
    same = trainer.logprobs(rows.with_column(TEMPERATURES, [np.full(length, 1.3, np.float32) for length in lengths]))
    for ours, high in zip(same, at_13, strict=True):
        np.testing.assert_array_equal(ours, high)


def test_rows_alone_come_out_with_the_same_bits_whatever_is_ready_with_them(
    make_trainer: Make, make_rows: MakeRows
) -> None:
    """A reference, which takes rows as they become ready, thus gives the same whenever they do."""
    rows, reference = make_rows(12), make_trainer(trainable=False, rows_alone=True)
    together = reference.logprobs(rows)
    for part in ([3], [0, 7, 11], list(range(6))):
        for position, values in zip(part, reference.logprobs(rows.select(part)), strict=True):
            assert values.tobytes() == together[position].tobytes()


def test_logprobs_after_an_update_are_those_of_the_new_weights(make_trainer: Make, make_rows: MakeRows) -> None:
    trainer, rows = make_trainer(lr=1e-2), make_rows(4)
    before = trainer.logprobs(rows)
    trainer.update(rows, sft_loss)
    assert np.mean(np.concatenate(trainer.logprobs(rows))) > np.mean(np.concatenate(before)) + 0.1


@pytest.mark.parametrize("loss", [ppo_clip_loss, partial(sft_loss, aggregation="sequence_mean")])
def test_the_token_budget_changes_no_gradient(
    make_trainer: Make, make_rows: MakeRows, weights_of: Weights, loss: Any
) -> None:
    rows, weights = make_rows(12), []
    for budget in (8192, 50):
        trainer = make_trainer(max_tokens_per_microbatch=budget, logprob_chunk_mib=0.005, **LINEAR)
        trainer.update(rows, loss)
        weights.append(weights_of(trainer))
    for name, whole in weights[0].items():
        torch.testing.assert_close(weights[1][name], whole, atol=1e-6, rtol=0, msg=name)


def test_activation_checkpointing_changes_no_gradient(
    make_trainer: Make, make_rows: MakeRows, weights_of: Weights
) -> None:
    weights = []
    for checkpointing in (False, True):
        trainer = make_trainer(activation_checkpointing=checkpointing, **LINEAR)
        trainer.update(make_rows(6), ppo_clip_loss)
        weights.append(weights_of(trainer))
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_bfloat16_computes_near_float32_and_keeps_float32_masters(
    make_trainer: Make, make_rows: MakeRows, weights_of: Weights
) -> None:
    rows = make_rows(6)
    exact = np.concatenate(make_trainer().logprobs(rows))
    trainer = make_trainer(dtype="bfloat16", lr=1e-3)
    near = np.concatenate(trainer.logprobs(rows))
    assert 0 < np.abs(near - exact).max() < 0.1
    report = trainer.update(rows, ppo_clip_loss)
    assert np.isfinite(report.metrics["actor/grad_norm"])
    assert {weight.dtype for weight in weights_of(trainer).values()} == {torch.float32}
    reference = make_trainer(dtype="bfloat16", trainable=False)
    np.testing.assert_allclose(np.concatenate(reference.logprobs(rows)), near, atol=0.05)


def test_old_logprobs_are_those_of_the_batchs_start_in_every_minibatch(make_trainer: Make, make_rows: MakeRows) -> None:
    rows, trainer = make_rows(8), make_trainer(lr=1e-2, num_minibatches=2, max_tokens_per_microbatch=60)
    start = trainer.logprobs(rows)
    olds: list[Tensor] = []
    drifts: list[float] = []

    def loss(
        logprobs: Tensor, mask: Tensor, totals: BatchTotals, old_logprobs: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        olds.extend(row[keep] for row, keep in zip(old_logprobs, mask, strict=True))
        drifts.append(float((logprobs.detach() - old_logprobs).abs().max()))
        return -(logprobs * mask).sum() / totals.num_tokens, {}

    trainer.update(rows, loss)
    seen = sorted(tuple(np.round(old.tolist(), 4)) for old in olds)
    assert seen == sorted(tuple(np.round(values.tolist(), 4)) for values in start)
    assert drifts[0] < 1e-5 < drifts[-1]


def test_epochs_are_those_of_a_plain_loop_against_the_batchs_start(
    make_trainer: Make, make_rows: MakeRows, weights_of: Weights, model_path: str, engine: str
) -> None:
    steps, trainer = [make_rows(6, seed=seed) for seed in (1, 2)], make_trainer(lr=3e-2)
    trainer.num_epochs = 3
    reports = [trainer.update(rows, ppo_clip_loss) for rows in steps]
    expected = plain_loop(model_path, steps, 3e-2, epochs=3)
    for name, weight in weights_of(trainer).items():
        if not name.endswith(
            "k_proj.bias"
        ):  # softmax does not see it: its gradient is rounding, which AdamW divides by
            torch.testing.assert_close(weight, expected[name], atol=2e-5, rtol=0, msg=name)
    assert trainer.num_updates == 2
    assert all(report.metrics["actor/clip_fraction"] > 0 for report in reports)


def test_each_epoch_takes_every_minibatch_and_the_first_alone_is_recorded(
    make_trainer: Make, make_rows: MakeRows
) -> None:
    rows, trainer, seen = make_rows(8), make_trainer(lr=1e-3, num_minibatches=2), []
    trainer.num_epochs = 2

    def loss(logprobs: Tensor, mask: Tensor, totals: BatchTotals) -> tuple[Tensor, dict[str, Tensor]]:
        seen.append(int(mask.any(-1).sum()))
        return (logprobs * mask).sum(), {"sequences": mask.any(-1).sum()}

    recorder = TokenRecorder()
    metrics = trainer.update(rows, loss, recorder).metrics
    assert sum(seen) == 2 * 8
    assert metrics["actor/sequences"] == 4.0
    values = recorder.values(rows, rows.lengths("response_ids").tolist())
    assert values is not None
    assert all(mask.all() for mask in values.loss_mask)


def test_with_one_minibatch_old_logprobs_are_the_current_ones(make_trainer: Make, make_rows: MakeRows) -> None:
    def loss(logprobs: Tensor, mask: Tensor, old_logprobs: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        assert torch.equal(logprobs, old_logprobs)
        assert not old_logprobs.requires_grad
        return (logprobs * mask).sum(), {}

    make_trainer().update(make_rows(4), loss)


def test_minibatches_average_their_metrics_and_sum_to_the_whole_batch(make_trainer: Make, make_rows: MakeRows) -> None:
    def loss(logprobs: Tensor, mask: Tensor, totals: BatchTotals) -> tuple[Tensor, dict[str, Tensor]]:
        return (logprobs * 0).sum(), {"sequences": mask.any(-1).sum(), "share": mask.sum() / totals.num_tokens}

    metrics = make_trainer(num_minibatches=3).update(make_rows(12), loss).metrics
    assert metrics["actor/sequences"] == 4.0
    assert metrics["actor/share"] == pytest.approx(1.0)


def test_a_loss_gets_the_columns_that_it_names_and_the_entropy_with_gradient(
    make_trainer: Make, make_rows: MakeRows
) -> None:
    def loss(
        logprobs: Tensor,
        mask: Tensor,
        totals: BatchTotals,
        entropy: Tensor,
        advantage: Tensor,
        novelty: Tensor | None = None,
        *,
        coef: float,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        assert novelty is None
        assert advantage.shape == mask.shape[:1]
        assert entropy.requires_grad
        assert coef == 0.5
        mean = (entropy * mask).sum() / totals.num_tokens
        return -coef * mean, {"mean_entropy": mean.detach()}

    metrics = make_trainer().update(make_rows(4), partial(loss, coef=0.5)).metrics
    assert metrics["actor/mean_entropy"] == pytest.approx(metrics["actor/entropy"], rel=1e-6)


def test_a_loss_that_reads_a_column_that_is_not_there_is_refused(make_trainer: Make, make_rows: MakeRows) -> None:
    with pytest.raises(DataflowError, match=r"'advantages'.*did you mean 'advantage'"):
        make_trainer().update(make_rows(4), lambda logprobs, advantages: None)


def test_mismatch_is_taken_against_the_behaviour_policy(make_trainer: Make, make_rows: MakeRows) -> None:
    trainer, rows = make_trainer(), make_rows(6)
    difference = np.concatenate(trainer.logprobs(rows)) - rows.ragged("behavior_logprobs")[0]
    metrics = trainer.update(rows, sft_loss).metrics
    assert metrics["mismatch/logprob_abs_mean"] == pytest.approx(np.abs(difference).mean(), rel=1e-4)
    assert metrics["mismatch/logprob_abs_max"] == pytest.approx(np.abs(difference).max(), rel=1e-4)
    assert metrics["mismatch/kl"] == pytest.approx((np.exp(difference) - 1 - difference).mean(), rel=1e-3)


def test_tokens_of_older_versions_are_lag_and_no_mismatch(make_trainer: Make, make_rows: MakeRows) -> None:
    trainer, rows = make_trainer(), make_rows(6)
    versions = [np.full(length, 7, np.int32) for length in rows.lengths("response_ids").tolist()]
    versions[2][:] = 6
    versions[3][: len(versions[3]) // 2] = 4  # a response within which the engine took newer weights
    rows = rows.with_column("token_versions", versions)
    difference = np.concatenate(trainer.logprobs(rows)) - rows.ragged("behavior_logprobs")[0]
    age = 7 - np.concatenate(versions)
    metrics = trainer.update(rows, sft_loss, version=7).metrics
    for prefix, suffix, some in (("mismatch", "", age == 0), ("lag", "@1", age == 1), ("lag", "@3", age == 3)):
        assert some.any()
        own = difference[some]
        assert metrics[f"{prefix}/logprob_abs_mean{suffix}"] == pytest.approx(np.abs(own).mean(), rel=1e-4)
        assert metrics[f"{prefix}/logprob_abs_max{suffix}"] == pytest.approx(np.abs(own).max(), rel=1e-4)
        assert metrics[f"{prefix}/kl{suffix}"] == pytest.approx((np.exp(own) - 1 - own).mean(), rel=1e-3)
    names = {name for name in metrics if name.startswith(("mismatch/", "lag/"))}
    assert len(names) == 9


def test_a_token_is_as_old_as_the_oldest_cache_that_it_was_sampled_from(
    make_trainer: Make, make_rows: MakeRows
) -> None:
    trainer, rows = make_trainer(), make_rows(6)
    versions = [np.full(length, 7, np.int32) for length in rows.lengths("response_ids").tolist()]
    versions[2][:] = 6
    versions[3][: len(versions[3]) // 2] = 6  # its later tokens are of version 7, with keys and values of version 6
    rows = rows.with_column("token_versions", versions)
    difference = np.concatenate(trainer.logprobs(rows)) - rows.ragged("behavior_logprobs")[0]
    age = np.repeat([0, 0, 1, 1, 0, 0], rows.lengths("response_ids"))
    trainer.keeps_caches = True
    metrics = trainer.update(rows, sft_loss, version=7).metrics
    for name, some in (("mismatch/logprob_abs_mean", age == 0), ("lag/logprob_abs_mean@1", age == 1)):
        assert metrics[name] == pytest.approx(np.abs(difference[some]).mean(), rel=1e-4)


def test_without_a_token_of_the_trainers_version_there_is_no_mismatch(make_trainer: Make, make_rows: MakeRows) -> None:
    rows = make_rows(4)
    versions = [np.full(length, 1, np.int32) for length in rows.lengths("response_ids").tolist()]
    metrics = (
        make_trainer(num_minibatches=2)
        .update(rows.with_column("token_versions", versions), sft_loss, version=3)
        .metrics
    )
    assert {name for name in metrics if name.startswith(("mismatch/", "lag/"))} == {
        "lag/logprob_abs_mean@2", "lag/logprob_abs_max@2", "lag/kl@2",
    }  # fmt: skip


def test_a_step_that_is_not_finite_is_left_out_and_counted(
    make_trainer: Make, make_rows: MakeRows, weights_of: Weights
) -> None:
    trainer, rows = make_trainer(lr=1e-2), make_rows(4)
    before = weights_of(trainer)
    metrics = trainer.update(rows, lambda logprobs: (logprobs.sum() * float("nan"), {})).metrics
    assert metrics["actor/skipped_nonfinite"] == 1.0
    assert all(torch.equal(before[name], weight) for name, weight in weights_of(trainer).items())
    assert trainer.update(rows, sft_loss).metrics["actor/skipped_nonfinite"] == 0.0
    assert not torch.equal(before["model.norm.weight"], weights_of(trainer)["model.norm.weight"])


def test_the_gradient_is_clipped_to_the_norm(make_trainer: Make, make_rows: MakeRows, weights_of: Weights) -> None:
    options = LINEAR | {"eps": 1e4, "lr": 1e4, "clip_norm": 0.01}  # a step of -g
    trainer = make_trainer(**options)
    before = weights_of(trainer)
    assert trainer.update(make_rows(6), sft_loss).metrics["actor/grad_norm"] > 0.1
    moved = torch.cat([(weight - before[name]).flatten() for name, weight in weights_of(trainer).items()])
    assert float(moved.norm()) == pytest.approx(0.01, rel=1e-3)


def test_the_schedule_counts_updates_and_goes_on_from_where_it_is_set(make_trainer: Make, make_rows: MakeRows) -> None:
    trainer = make_trainer(lr=1.0e-3, warmup_steps=10, num_minibatches=2)
    rates = [trainer.update(make_rows(4), sft_loss).metrics["actor/lr"] for _ in range(2)]
    trainer.num_updates = 9
    rates.append(trainer.update(make_rows(4), sft_loss).metrics["actor/lr"])
    assert rates == pytest.approx([1e-4, 2e-4, 1e-3])


def test_rows_longer_than_the_model_are_refused(make_trainer: Make) -> None:
    rows = Rows.from_lists({"prompt_ids": [[5] * 40], "response_ids": [[6] * 30]})
    with pytest.raises(DataError, match=r"a sequence of 70 tokens.*more than the model's 64 positions"):
        make_trainer().update(rows, sft_loss)


def test_a_report_counts_this_ranks_rows_and_tokens(make_trainer: Make, make_rows: MakeRows) -> None:
    rows = make_rows(6)
    report = make_trainer().update(rows, sft_loss)
    assert (report.num_samples, report.num_tokens) == (6, len(rows.ragged("response_ids")[0]))
    assert {"plan", "forward", "backward", "optimizer", "update"} <= report.seconds.keys()


def test_times_of_an_update_are_told_by_the_devices_clock(
    make_trainer: Make, make_rows: MakeRows, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, seconds = make_trainer(), itertools.count()
    monkeypatch.setattr("penstock.workers.trainer.policy_trainer.clock", lambda device: float(next(seconds)))
    expected = {"plan": 1.0, "forward": 1.0, "backward": 1.0, "optimizer": 1.0, "update": 8.0}
    assert trainer.update(make_rows(6), sft_loss).seconds == expected


def test_a_reference_keeps_no_gradients_and_no_optimizer(make_trainer: Make, make_rows: MakeRows) -> None:
    reference = make_trainer(trainable=False)
    assert not any(parameter.requires_grad for parameter in reference.model.parameters())
    assert len(reference.logprobs(make_rows(5))) == 5
    with pytest.raises(RuntimeError, match="trainable"):
        reference.update(make_rows(4), sft_loss)

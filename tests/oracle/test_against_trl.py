"""The losses against TRL's `GRPOTrainer._compute_loss`, on random ragged batches: values and gradients, rtol 1e-5.

The trainer's method is called on a stand-in that has the settings it reads and no model: its log-probabilities are the
batch's. Runs in its own environment, `make oracle`; TRL is never a dependency. What differs on purpose:

- TRL averages "grpo", "sapo" and "dr_grpo" over the rows of a micro-batch, then over micro-batches; here the
  normaliser is of the whole step. The batches below are one micro-batch and every row has a token, where the two
  are the same.
- CISPO: TRL has no lower bound and gives the upper one as a ratio; here both are distances from 1.
- `delta` bounds the ratio itself, of good tokens, too; above 1 + clip_high that is the dual clip.
- The correction of TRL is an input here, compared with the weights that `truncated` and `masked` give.
"""

from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from trl.experimental.sdpo.loss_utils import add_tail_bucket, compute_divergence
from trl.trainer.grpo_trainer import GRPOTrainer

from penstock.algorithms.aggregation import BatchTotals
from penstock.algorithms.builtin.imitation import divergence_loss
from penstock.algorithms.corrections import CORRECTIONS
from penstock.algorithms.losses import policy_loss, with_entropy_bonus
from tests.oracle.batches import SEEDS, assert_same, batch, ours, theirs
from tests.oracle.epochs import Table, of_rows, train

CLIPS = {"clip_low": 0.1, "clip_high": 0.15}


def trl_loss(columns, loss_type, **settings):
    return theirs(columns, loss_function(columns, loss_type, **settings))


def loss_function(
    columns, loss_type, *, level="token", beta=0.0, delta=None, epsilon_high=0.15, weights=None, entropy=None
):
    """TRL's loss of these columns, as a function of the log-probabilities."""
    mask = columns["mask"].double()
    args = SimpleNamespace(
        delta=delta,
        sapo_temperature_pos=1.0,
        sapo_temperature_neg=1.05,
        use_bias_correction_kl=False,
        steps_per_generation=1,
    )
    accelerator = SimpleNamespace(
        num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x, sync_gradients=True
    )
    entropies = torch.zeros_like(mask) if entropy is None else entropy

    def loss_of(logprobs):
        trainer = SimpleNamespace(
            _get_per_token_logps_and_entropies=lambda *_, **__: (logprobs, entropies, None),
            accelerator=accelerator,
            args=args,
            aux_loss_enabled=False,
            beta=beta,
            current_gradient_accumulation_steps=1,
            entropy_coef=0.3,
            epsilon_high=epsilon_high,
            epsilon_low=0.1,
            importance_sampling_level=level,
            loss_type=loss_type,
            max_completion_length=11,
            model=SimpleNamespace(training=True),
            off_policy_mask_threshold=None,
            top_entropy_quantile=1.0,
            use_adaptive_entropy=False,
            use_vllm=weights is not None,
            vllm_importance_sampling_correction=weights is not None,
            _entropy_bonus_enabled=entropy is not None,
            _metrics={"train": defaultdict(list)},
        )
        nothing = torch.zeros(len(mask), 0)
        inputs = {
            "prompt_ids": nothing,
            "prompt_mask": nothing,
            "completion_ids": torch.zeros_like(mask),
            "completion_mask": mask,
            "advantages": columns["advantage"],
            "old_per_token_logps": columns["old_logprobs"],
            "ref_per_token_logps": columns["reference_logprobs"],
            "num_items_in_batch": mask.sum(),
            "importance_sampling_ratio": weights,
        }
        return GRPOTrainer._compute_loss(trainer, None, inputs)

    return loss_of


@pytest.mark.parametrize(
    ("loss_type", "settings"),
    [
        ("grpo", {"aggregation": "sequence_mean"}),
        ("bnpo", {"aggregation": "token_mean"}),
        ("dapo", {"aggregation": "token_mean"}),
        ("dr_grpo", {"aggregation": "constant", "constant": 11.0}),
        ("luspo", {"aggregation": "sequence_sum"}),
    ],
)
@given(seed=SEEDS)
def test_the_clipped_loss_in_every_aggregation(loss_type, settings, seed):
    columns = batch(seed)
    assert_same(ours(columns, surrogate_options=CLIPS, **settings), trl_loss(columns, loss_type))


@pytest.mark.parametrize("epochs", [1, 3])
@given(seed=SEEDS)
def test_several_updates_a_batch_are_num_iterations(epochs, seed):
    """The trainer's own `_prepare_inputs` says which part of a generation each of its optimizer steps gets."""
    columns = batch(seed)
    table = Table(columns, seed)
    generated = {"rows": torch.arange(len(columns["mask"])), "old_logprobs": table.logprobs().detach()}
    trainer = SimpleNamespace(
        model=SimpleNamespace(training=True),
        args=SimpleNamespace(steps_per_generation=2),
        num_iterations=epochs,
        _generate_and_score_completions=dict,
        _buffered_inputs=None,
    )
    minibatches = []
    for number in range(2 * epochs):
        vars(trainer)["_step"] = number
        part = GRPOTrainer._prepare_inputs(trainer, generated)
        minibatches.append(part["rows"])
        of_part = of_rows(columns, part["rows"]) | {"old_logprobs": part["old_logprobs"]}
        table.step(loss_function(of_part, "grpo")(table.logprobs(part["rows"])))
    settings = {"surrogate_options": CLIPS, "aggregation": "sequence_mean"}
    torch.testing.assert_close(train(columns, seed, minibatches[:2], epochs, **settings).logits, table.logits)


@given(seed=SEEDS)
def test_two_sided_clipping_is_the_dual_clip(seed):
    columns = batch(seed)
    got = ours(columns, surrogate_options=CLIPS | {"dual_clip": 1.3})
    assert_same(got, trl_loss(columns, "dapo", delta=1.3))


@pytest.mark.parametrize("beta", [0.1, 2.0])
@given(seed=SEEDS)
def test_the_kl_term(beta, seed):
    columns = batch(seed)
    got = ours(columns, surrogate_options=CLIPS, kl_coef=beta, aggregation="sequence_mean")
    assert_same(got, trl_loss(columns, "grpo", beta=beta))


@pytest.mark.parametrize("surrogate", ["gspo", "gspo_token"])
@given(seed=SEEDS)
def test_ratios_of_whole_responses(surrogate, seed):
    columns = batch(seed)
    got = ours(columns, surrogate=surrogate, surrogate_options=CLIPS, aggregation="sequence_mean")
    assert_same(got, trl_loss(columns, "grpo", level="sequence"))


@given(seed=SEEDS)
def test_cispo(seed):
    columns = batch(seed)
    got = ours(columns, surrogate="cispo", surrogate_options={"clip_high": 0.15})
    assert_same(got, trl_loss(columns, "cispo", epsilon_high=1.15))


@given(seed=SEEDS)
def test_sapo(seed):
    columns = batch(seed)
    assert_same(ours(columns, surrogate="sapo", aggregation="sequence_mean"), trl_loss(columns, "sapo"))


@pytest.mark.parametrize(
    ("name", "options"),
    [("truncated", {"cap": 1.2}), ("masked", {"low": 0.8, "high": 1.2}), ("sequence_truncated", {"cap": 1.2})],
)
@given(seed=SEEDS)
def test_a_correction_weighs_the_policy_term_and_not_the_kl_term(name, options, seed):
    columns = batch(seed)
    weights, _ = CORRECTIONS[name](columns["old_logprobs"], columns["behavior_logprobs"], columns["mask"], **options)
    got = ours(
        columns,
        proximal="old",
        surrogate_options=CLIPS,
        correction=name,
        correction_options=options,
        kl_coef=0.1,
    )
    assert_same(got, trl_loss(columns, "dapo", beta=0.1, weights=weights))


@given(seed=SEEDS)
def test_the_entropy_bonus(seed):
    # the entropy stands in for a function of the model: here of its log-probabilities
    columns = batch(seed)
    entropy = columns["reference_logprobs"].neg()

    def mine(logprobs):
        loss = with_entropy_bonus(policy_loss, 0.3)
        return loss(
            logprobs=logprobs,
            mask=columns["mask"],
            totals=BatchTotals.of(columns["mask"]),
            advantage=columns["advantage"],
            behavior_logprobs=columns["old_logprobs"],
            old_logprobs=columns["old_logprobs"],
            entropy=entropy,
            surrogate_options=CLIPS,
            correction="none",
        )[0]

    assert_same(theirs(columns, mine), trl_loss(columns, "dapo", entropy=entropy))


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("divergence", "alpha"), [("forward_kl", 0.0), ("reverse_kl", 1.0), ("jensen_shannon", 0.3)])
def test_divergences_over_candidates_are_trls_with_a_tail(seed: int, divergence: str, alpha: float) -> None:
    """TRL's alpha is the teacher's weight in the mixture."""
    generator = torch.Generator().manual_seed(seed)
    logits, others = (torch.randn(3, 7, 13, generator=generator, dtype=torch.float64) for _ in range(2))
    logits.requires_grad_()
    teacher = others.log_softmax(-1)
    ids = teacher.topk(4, dim=-1).indices
    mask = torch.rand(3, 7, generator=generator) < 0.7
    values = []
    for is_ours in (True, False):
        student = logits.log_softmax(-1).gather(-1, ids)
        chosen = teacher.gather(-1, ids)
        if is_ours:
            value, _ = divergence_loss(student, mask, BatchTotals.of(mask), chosen, divergence=divergence, beta=alpha)
        else:
            tokens = compute_divergence(add_tail_bucket(student), add_tail_bucket(chosen), alpha)
            value = tokens[mask].mean()
        values.append((value, torch.autograd.grad(value, logits)[0]))
    for ours_, theirs_ in zip(*values, strict=True):
        torch.testing.assert_close(ours_, theirs_, rtol=1e-6, atol=1e-9)

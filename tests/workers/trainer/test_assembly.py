"""One rank's parts without Ray, the shells that are light to import, and how fast a rank is by threads, which leaves no
trace in what it trains."""

import asyncio
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from penstock.algorithms.graph.stage import TrainedPolicy
from penstock.algorithms.losses import ppo_clip_loss
from penstock.conf.errors import ModelError, NotStarted
from penstock.conf.trainer import TrainerConfig
from penstock.store.client.store_client import StoreClient
from penstock.store.client.sync import SyncStoreClient
from penstock.workers.trainer.assembly import (
    NUM_ROWS,
    NUM_TOKENS,
    assemble_scorer,
    assemble_trainer,
    seconds_per_token,
    trial_rows,
    use_threads,
)
from penstock.workers.trainer.memory_slots import copied_steps
from penstock.workers.trainer.policy_trainer import PolicyTrainer
from penstock.workers.trainer.rank_spec import ScorerSpec, TrainerSpec
from penstock.workers.trainer.scalar import ScalarTrainer
from penstock.workers.trainer.trainer_actor import Scorer, Trainer
from tests.workers.trainer.test_worker import fill, flow, make_store


def trainer_spec(model_path: str, **options: object) -> TrainerSpec:
    policies = (TrainedPolicy("policy", ppo_clip_loss),)
    options = {"config": TrainerConfig(), "stage": "train", "policies": policies} | options
    return TrainerSpec(name="Trainer-policy-0", model_path=model_path, **options)


def scorer_spec(model_path: str, **options: object) -> ScorerSpec:
    options = {"stage": "reference", "columns": ("reference_logprobs",)} | options
    return ScorerSpec(name="Scorer-reference-0", config=TrainerConfig(), model_path=model_path, **options)


@pytest.mark.real
def test_the_actors_wait_for_torch_and_transformers_until_they_are_made() -> None:
    code = (
        "import sys, penstock.workers.trainer.trainer_actor\n"
        "print([name for name in ('torch', 'transformers', 'vllm', 'peft') if name in sys.modules])"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed.strip() == "[]"


def test_assembled_parts_take_a_batch_through_the_store(model_path: str) -> None:
    async def run() -> tuple[object, dict[str, float]]:
        store = make_store()
        client = StoreClient(store)
        await fill(client)
        scorer = assemble_scorer(scorer_spec(model_path), None)
        trainer = assemble_trainer(trainer_spec(model_path, policies=flow().stage("train").policies), None)
        trainer.worker.attach(SyncStoreClient(store))
        serving = asyncio.create_task(asyncio.to_thread(scorer.worker.run, SyncStoreClient(store)))
        report = await asyncio.to_thread(trainer.worker.step, 1)
        await client.close("done")
        await serving
        stats = scorer.worker.stats()
        trainer.trainer.close()
        scorer.trainer.close()
        return report, stats

    report, stats = asyncio.run(run())
    assert report is not None
    assert stats["rows"] == 4


def test_a_trainer_that_keeps_its_state_is_followed_by_one_that_goes_on_from_it(
    model_path: str, tmp_path: Path
) -> None:
    spec = trainer_spec(model_path, memory_checkpoint_root=str(tmp_path), policies=flow().stage("train").policies)

    async def run() -> Trainer:
        store = make_store()
        client = StoreClient(store)
        await fill(client)
        scorer, trainer = assemble_scorer(scorer_spec(model_path), None), Trainer(spec)
        trainer.start(None)
        await asyncio.to_thread(trainer.attach, store)
        serving = asyncio.create_task(asyncio.to_thread(scorer.worker.run, SyncStoreClient(store)))
        assert copied_steps(tmp_path, 0) == []
        assert await asyncio.to_thread(trainer.step, 1)
        await client.close("done")
        await serving
        scorer.trainer.close()
        return trainer

    dead, anew = asyncio.run(run()), Trainer(spec)
    assert copied_steps(tmp_path, 0) == [1]
    anew.start(None)
    anew.restore(1)
    expected, ours = (trainer._parts.state.pieces_of_rank() for trainer in (dead, anew))
    assert all(torch.equal(one.values, other.values) for one, other in zip(ours, expected, strict=True))
    for trainer in (anew, dead):
        trainer.close()
    assert copied_steps(tmp_path, 0) == [1]


def test_a_trainer_that_keeps_nothing_says_by_which_key_it_would(model_path: str) -> None:
    trainer = Trainer(trainer_spec(model_path))
    trainer.start(None)
    try:
        with pytest.raises(NotStarted, match=r"this call needs faults\.keep_state=true"):
            trainer.restore(1)
    finally:
        trainer.close()


def test_a_reward_model_is_assembled_where_the_stage_asks_for_scores(model_path: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"score\.weight\. A language model has no such head\. Choose a reward model"):
        assemble_scorer(scorer_spec(model_path, head="scores", columns=("reward",)), None)
    trained = ScalarTrainer(TrainerConfig(), model_path)
    trained.export(str(tmp_path))
    trained.close()
    parts = assemble_scorer(scorer_spec(str(tmp_path), head="scores", columns=("reward",)), None)
    try:
        assert isinstance(parts.trainer, ScalarTrainer)
        assert not parts.trainer.trainable
    finally:
        parts.trainer.close()


def test_a_call_before_the_one_that_it_needs_is_named(model_path: str) -> None:
    trainer, scorer = Trainer(trainer_spec(model_path)), Scorer(scorer_spec(model_path))
    with pytest.raises(NotStarted, match="Trainer-policy-0: this call needs `start` first"):
        trainer.begin_publishing("", 1)
    with pytest.raises(NotStarted, match="Trainer-policy-0: this call needs `connect` first"):
        trainer.send(1)
    with pytest.raises(NotStarted, match="Scorer-reference-0: this call needs `start` first"):
        scorer.run(None)


def test_a_trainer_without_a_store_takes_no_step_of_it(model_path: str) -> None:
    trainer = Trainer(trainer_spec(model_path))
    trainer.start(None)
    try:
        with pytest.raises(NotStarted, match="needs a store"):
            trainer.step(1)
    finally:
        trainer.close()


def test_each_number_of_threads_is_tried_and_nothing_that_is_trained_changes(
    make_trainer: Callable[..., PolicyTrainer],
) -> None:
    trainer = make_trainer()
    before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    found = seconds_per_token(trainer, [1, 2])
    assert found.keys() == {1, 2}
    assert min(found.values()) > 0
    assert torch.get_num_threads() == 2
    after = trainer.model.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert trainer.num_updates == 0


def test_rows_that_are_tried_fit_the_model() -> None:
    assert trial_rows(16).lengths("response_ids").tolist() == [15] * NUM_ROWS
    assert trial_rows(4096).lengths("response_ids").tolist() == [NUM_TOKENS] * NUM_ROWS


def test_no_number_leaves_the_threads_as_they_are() -> None:
    use_threads(2)
    use_threads(0)
    assert torch.get_num_threads() == 2

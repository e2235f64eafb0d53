"""Settings of ranks that share rows, accepted and refused, in one process. Several: `test_ranks_parallel.py`."""

import datetime
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, MistralConfig, MistralForCausalLM

from penstock.algorithms.graph.stage import TrainedPolicy
from penstock.algorithms.losses import sft_loss
from penstock.conf.errors import ConfigError
from penstock.conf.trainer import LoraConfig, TrainerConfig
from penstock.store.client.lease import Share
from penstock.store.data.rows import Rows
from penstock.workers.trainer.engines import mesh, tensor_parallel, ulysses
from penstock.workers.trainer.engines.lora import add_adapters
from penstock.workers.trainer.models.language_model import load_causal_lm
from penstock.workers.trainer.policy_trainer import PolicyTrainer
from penstock.workers.trainer.ranks import Ranks
from penstock.workers.trainer.trainer_worker import Alone, ScorerWorker, TrainerWorker
from tests.workers.trainer.conftest import as_reference

Make = Callable[..., PolicyTrainer]
MINUTE = datetime.timedelta(minutes=1)


@given(num_data_ranks=st.integers(1, 6), num_peers=st.integers(1, 6))
def test_every_share_of_the_rows_has_one_rank_that_speaks_for_it(num_data_ranks: int, num_peers: int) -> None:
    num_ranks = num_data_ranks * num_peers
    cpu = torch.device("cpu")
    every = [Ranks(rank, num_ranks, cpu, False, MINUTE, num_peers) for rank in range(num_ranks)]
    assert {ranks.num_data_ranks for ranks in every} == {num_data_ranks}
    assert [ranks.data_rank for ranks in every if ranks.reports_rows] == list(range(num_data_ranks))
    assert [ranks.data_rank for ranks in every].count(0) == num_peers


@given(num_rows=st.integers(0, 50), size=st.integers(1, 9))
def test_shards_of_rows_cover_each_once(num_rows: int, size: int) -> None:
    starts = [mesh.first_row(num_rows, rank, size) for rank in range(size + 1)]
    assert starts[0] == 0
    assert starts[-1] == num_rows
    assert starts == sorted(starts)


@pytest.mark.parametrize("key", ["tensor_parallel_size", "sequence_parallel_size"])
def test_a_size_that_does_not_divide_the_ranks_is_refused(key: str) -> None:
    with pytest.raises(ConfigError, match=rf"trainer\.{key}=2: must divide trainer\.num_ranks=3"):
        TrainerConfig(num_ranks=3, **{key: 2})


def test_both_sizes_together_must_divide_the_ranks() -> None:
    with pytest.raises(ConfigError, match=r"tensor_parallel_size x trainer\.sequence_parallel_size=4: must divide"):
        TrainerConfig(num_ranks=2, tensor_parallel_size=2, sequence_parallel_size=2)
    assert TrainerConfig(num_ranks=8, tensor_parallel_size=2, sequence_parallel_size=2).ranks_per_row == 4


def test_heads_that_do_not_divide_are_refused(model_path: str) -> None:
    lm = load_causal_lm(model_path)  # two heads, one of keys and values
    with pytest.raises(ConfigError, match=r"tensor_parallel_size=3 must divide the model's num_attention_heads=2"):
        tensor_parallel.split_plan(lm, 3)
    with pytest.raises(ConfigError, match=r"tensor_parallel_size=2 must divide the model's num_key_value_heads=1"):
        tensor_parallel.split_plan(lm, 2)
    with pytest.raises(ConfigError, match=r"sequence_parallel_size=2 times .* must divide the model's num_key_value"):
        ulysses.check(lm, 2, 1)


def test_a_model_without_a_plan_is_refused() -> None:
    lm = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=9))
    with pytest.raises(ConfigError, match="no plan for splitting GPT2LMHeadModel"):
        tensor_parallel.split_plan(lm, 2)


def test_windows_and_other_attention_are_refused_for_sequence_parallelism(model_path: str) -> None:
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "vocab_size": 9}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    lm = MistralForCausalLM(MistralConfig(sliding_window=4, **sizes, **heads))
    with pytest.raises(ConfigError, match="mistral has layers of sliding_attention"):
        ulysses.check(lm, 2, 1)
    with pytest.raises(ConfigError, match=r"and model\.attention=eager"):
        ulysses.check(load_causal_lm(model_path, attention="eager"), 1, 1)


def test_the_plan_names_the_linear_layers_of_the_decoder(model_path: str) -> None:
    plan = tensor_parallel.split_plan(load_causal_lm(model_path), 1)
    first = {name.removeprefix("model.layers.0."): style for name, style in plan.items() if ".0." in name}
    assert first == {
        **{f"self_attn.{name}_proj": "colwise" for name in "qkv"},
        "self_attn.o_proj": "rowwise", "mlp.gate_proj": "colwise", "mlp.up_proj": "colwise", "mlp.down_proj": "rowwise",
    }  # fmt: skip
    assert len(plan) == 14


def test_an_adapter_is_split_as_the_layer_that_it_changes(model_path: str) -> None:
    lm = load_causal_lm(model_path)
    add_adapters(lm, LoraConfig(rank=2))
    styles = tensor_parallel.module_styles(lm, tensor_parallel.split_plan(lm, 1))
    assert {name.removeprefix("model.layers.0.self_attn.") for name in styles if ".0.self_attn.q" in name} == {
        "q_proj.base_layer", "q_proj.lora_B.default"
    }  # fmt: skip
    assert {name.removeprefix("model.layers.0.self_attn.") for name in styles if ".0.self_attn.o" in name} == {
        "o_proj.base_layer", "o_proj.lora_A.default"
    }  # fmt: skip


def test_offloading_changes_no_bit_on_a_cpu(
    make_trainer: Make, make_rows: Callable[..., Rows], weights_of: Callable[[PolicyTrainer], dict[str, Tensor]]
) -> None:
    trainers = [make_trainer(offload=offload, lr=1e-2) for offload in (False, True)]
    for trainer in trainers:
        trainer.update(make_rows(4), sft_loss)
    plain, offloaded = (weights_of(trainer) for trainer in trainers)
    assert all(torch.equal(offloaded[name], weight) for name, weight in plain.items())


class OneBatch:
    """A store with one round, which counts what it is told."""

    def __init__(self, rows: Rows) -> None:
        self.rows, self.stage, self.version, self.round = rows, "stage", 0, 0
        self.asked: list[tuple[int, int]] = []
        self.share, self.written = Share(5, 3), 0

    def lease_shared(self, stage: str, round: int, rank: int, num_ranks: int, max_units: int = 1) -> Any:
        self.asked.append((rank, num_ranks))
        return self

    def write(self, lease: Any, row_ids: np.ndarray, columns: dict[str, Any]) -> None:
        self.written += len(row_ids)


def test_a_rank_that_does_not_speak_for_its_rows_trains_them_and_reports_none(
    make_trainer: Make, make_rows: Callable[..., Rows]
) -> None:
    store, rows, trainer = OneBatch(make_rows(4)), make_rows(4), make_trainer()
    policies = [TrainedPolicy("policy", sft_loss)]
    trainers = [TrainerWorker(trainer, policies, Alone(0, 3, 5, speaks)) for speaks in (True, False)]
    for worker in trainers:
        worker.attach(store)
    reports = [worker.step(1) for worker in trainers]
    assert store.asked == [(3, 5)] * 2
    assert [report.share for report in reports if report] == [store.share, None]
    assert [len(report.rows.response_tokens_N) for report in reports if report] == [4, 0]
    workers = [
        ScorerWorker(as_reference(trainer.logprobs), "reference", Alone(reports_rows=speaks))
        for speaks in (True, False)
    ]
    for scorer in workers:
        scorer.serve(store, 0)
    assert store.written == len(rows)
    assert [scorer.stats()["rows"] for scorer in workers] == [4.0, 0.0]

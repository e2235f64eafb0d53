"""The transport that a configuration gets, and those that it cannot have."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.conf.algorithms import GrpoConfig
from penstock.conf.capabilities import ROLLOUT_ENGINES
from penstock.conf.errors import ConfigError
from penstock.conf.rollout import RolloutConfig
from penstock.conf.run import RunConfig, validate
from penstock.conf.trainer import LoraConfig, TrainerConfig
from penstock.conf.weights import (
    STREAMS,
    TRANSPORTS,
    WeightsConfig,
    choose_transport,
    shares_gpus,
    takes_newcomers,
)


def run(transport="auto", trainer_gpus=0.0, engine_gpus=0.0, ranks=1, lora=None, **rollout):
    return RunConfig(
        algorithm=GrpoConfig(),
        weights=WeightsConfig(transport=transport),
        trainer=TrainerConfig(num_gpus_per_rank=trainer_gpus, num_ranks=ranks, lora=lora or LoraConfig()),
        rollout=RolloutConfig(num_gpus_per_worker=engine_gpus, **rollout),
    )


ALONE = LoraConfig(rank=8, publish="adapter")


@pytest.mark.parametrize(
    "config",
    [
        run(),
        run(trainer_gpus=1, engine_gpus=1),
        run(trainer_gpus=1, engine_gpus=1, num_workers="auto"),
        run(trainer_gpus=0.5, engine_gpus=0.5),
        run(trainer_gpus=1, engine_gpus=1, tensor_parallel_size=2),
        run(trainer_gpus=1, engine_gpus=1, engine="hf"),
        run(trainer_gpus=1, engine_gpus=1, lora=LoraConfig(rank=8)),
        run(trainer_gpus=1, engine_gpus=1, lora=ALONE),
        run("shm", lora=ALONE),
    ],
)
def test_auto_is_shared_memory_with_gpus_too_so_members_may_come_and_go(config):
    assert choose_transport(config) == "shm"
    assert takes_newcomers(config)


@pytest.mark.parametrize(("transport", "gpus"), [("ipc", 0.5), ("nccl", 1), ("nccl_m2n", 1)])
def test_what_is_streamed_is_asked_for_by_name_and_takes_no_newcomers(transport, gpus):
    assert not takes_newcomers(run(transport, gpus, gpus))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (run("ipc"), r"transport=ipc: it moves weights from GPU to GPU, and trainer.num_gpus_per_rank=0"),
        (run("nccl"), r"transport=nccl: .* trainer.num_gpus_per_rank=0"),
        (run("nccl", trainer_gpus=1), r"transport=nccl: .* rollout.num_gpus_per_worker=0"),
        (run("nccl_m2n", engine_gpus=1), r"transport=nccl_m2n: .* trainer.num_gpus_per_rank=0"),
        (run("nccl_m2n", 1, 1, lora=LoraConfig(rank=8)), r"transport=nccl_m2n: .* trainer.lora.rank=8"),
        (run("nccl", 1, 1, engine="hf"), r"transport=nccl: only vllm engines .* rollout.engine=hf"),
        (run("ipc", 1, 1), r"transport=ipc: .* must share a GPU, and trainer.num_gpus_per_rank=1 and .*=1 give"),
        (run("nccl", 0.5, 0.5), r"transport=nccl: NCCL cannot connect two processes on one GPU"),
        (run("ipc", 0.5, 0.5, num_workers=2), r"rollout.num_workers=2 engines .* trainer.num_ranks=1"),
        (run("nccl", 1, 1, num_workers="auto"), r"transport=nccl: .* rollout.num_workers=auto lets engines come later"),
        (run("ipc", 0.5, 0.5, ranks=2, tensor_parallel_size=2), r"tensor_parallel_size=2 meet trainer.num_ranks=2"),
        (run("nccl", 1, 1, lora=ALONE), r"transport=nccl: it streams whole models, and trainer.lora.publish=adapter"),
        (run("ipc", 0.5, 0.5, lora=ALONE), r"transport=ipc: it streams whole models"),
        (run(lora=LoraConfig(rank=513, publish="adapter")), r"trainer.lora.rank=513: .* of rank 512 at most"),
    ],
)
def test_a_choice_that_cannot_work_is_refused_with_its_keys(config, message):
    with pytest.raises(ConfigError, match=message):
        validate(config)


@pytest.mark.parametrize(
    "config",
    [
        run(lora=LoraConfig(rank=512, publish="adapter")),
        run(lora=LoraConfig(rank=513)),
        run(lora=LoraConfig(rank=513, publish="adapter"), engine="hf"),
    ],
)
def test_ranks_are_limited_where_vllm_serves_the_adapter(config):
    validate(config)


@pytest.mark.real
def test_ranks_that_vllm_has_room_for_are_its_own():
    from typing import get_args

    lora = pytest.importorskip("vllm.config.lora", reason="vLLM is not installed: its ranks are not known")
    ranks = ROLLOUT_ENGINES["vllm"].lora_ranks
    assert set(ranks) <= set(get_args(lora.MaxLoRARanks))
    assert max(ranks) == max(get_args(lora.MaxLoRARanks))


def test_what_was_asked_for_is_taken_where_it_works():
    assert choose_transport(run("shm", 1, 1)) == "shm"
    assert choose_transport(run("nccl_m2n", 1, 1)) == "nccl_m2n"
    assert choose_transport(run("ipc", 0.4, 0.5)) == "ipc"


def test_an_unknown_transport_and_an_empty_bucket_are_refused():
    with pytest.raises(ConfigError, match=r"weights.transport=ncl: unknown; did you mean 'nccl'"):
        WeightsConfig(transport="ncl")
    with pytest.raises(ConfigError, match=r"weights.bucket_mib=0"):
        WeightsConfig(bucket_mib=0)


@given(
    st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0]),
    st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0]),
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 2),
    st.sampled_from([*ROLLOUT_ENGINES]),
    st.sampled_from(TRANSPORTS),
)
def test_what_is_taken_suits_the_gpus(trainer_gpus, engine_gpus, ranks, workers, parallel, engine, name):
    sizes = {"num_workers": workers, "tensor_parallel_size": parallel, "engine": engine}
    config = run(name, trainer_gpus, engine_gpus, ranks, **sizes)
    try:
        assert choose_transport(config) == name
    except ConfigError:
        assert name in STREAMS
        return
    if name in STREAMS:
        assert min(trainer_gpus, engine_gpus) > 0
        assert (name == "ipc") == shares_gpus(config)

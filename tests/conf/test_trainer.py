import pytest

from penstock.conf.errors import ConfigError
from penstock.conf.trainer import DeepSpeedConfig, LoraConfig, TrainerConfig


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": -1}, r"trainer\.lora\.rank=-1: must be at least 0"),
        ({"rank": 4, "alpha": 0}, r"trainer\.lora\.alpha=0: must be at least 1"),
        ({"rank": 4, "target_modules": []}, r"trainer\.lora\.target_modules=\[\]: nothing would be trained"),
        ({"rank": 4, "publish": "adaptor"}, r"trainer\.lora\.publish=adaptor: unknown; did you mean 'adapter'"),
        (
            {"publish": "adapter"},
            r"publish=adapter: there is none with trainer\.lora\.rank=0\. Set trainer\.lora\.rank",
        ),
    ],
)
def test_adapters_that_could_not_learn_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        LoraConfig(**options)


@pytest.mark.parametrize("key", ["tensor_parallel_size", "sequence_parallel_size"])
def test_a_split_into_less_than_one_is_refused(key):
    with pytest.raises(ConfigError, match=rf"trainer\.{key}=0: must be at least 1"):
        TrainerConfig(**{key: 0})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_ranks": 4, "shard_size": -1}, r"trainer\.shard_size=-1: must be at least 0"),
        ({"num_ranks": 4, "shard_size": 3}, r"trainer\.shard_size=3: must divide trainer\.num_ranks=4"),
        (
            {"num_ranks": 4, "shard_size": 1, "tensor_parallel_size": 2},
            r"trainer\.tensor_parallel_size=2: must divide trainer\.shard_size=1",
        ),
        (
            {"num_ranks": 4, "shard_size": 2, "engine": "deepspeed"},
            r"trainer\.shard_size is for trainer\.engine=fsdp only\. Choose that, or set it to 0",
        ),
    ],
)
def test_copies_that_could_not_be_whole_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        TrainerConfig(**options)


@pytest.mark.parametrize(
    "options",
    [
        {"tensor_parallel_size": 2, "sequence_parallel_size": 2, "shard_size": 2},
        {"engine": "deepspeed", "offload": True},
        {"num_gpus_per_rank": 1, "liger": True, "compile": True},
    ],
)
def test_one_rank_can_read_what_ranks_of_any_kind_trained(options):
    alone = TrainerConfig(num_ranks=4, lora=LoraConfig(rank=0 if "engine" in options else 4), **options).alone()
    assert (alone.num_ranks, alone.ranks_per_row, alone.num_gpus_per_rank) == (1, 1, 0)
    assert alone.lora.rank == (0 if "engine" in options else 4)


def test_by_default_each_rank_has_rows_of_its_own():
    config = TrainerConfig(num_ranks=3)
    assert config.ranks_per_row == 1
    assert config.lora.rank == 0
    assert not config.lora.publishes_adapter
    assert not config.offload


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"engine": "deepspeed", "deepspeed": DeepSpeedConfig(zero_stage=3)},
            r"Set trainer\.deepspeed\.zero_stage to 2",
        ),
        ({"num_ranks": 2, "tensor_parallel_size": 2}, r"tensor_parallel_size=2 and .* communicate inside"),
        ({"num_ranks": 2, "sequence_parallel_size": 2}, r"sequence_parallel_size=2 communicate inside"),
    ],
)
def test_layers_that_wait_for_other_ranks_are_not_compiled(options, message):
    with pytest.raises(ConfigError, match=rf"trainer\.compile=true: .*{message}"):
        TrainerConfig(compile=True, **options)
    assert TrainerConfig(compile=True, engine="deepspeed").compile


@pytest.mark.parametrize("engine", ["fsdp", "deepspeed"])
def test_both_engines_offload_by_the_same_key(engine):
    assert TrainerConfig(engine=engine, offload=True).offload


def test_kernels_of_gpus_are_refused_on_cpus():
    with pytest.raises(ConfigError, match=r"trainer\.liger=true: .* trainer\.num_gpus_per_rank=0\. Set that to 1"):
        TrainerConfig(liger=True)
    assert TrainerConfig(liger=True, num_gpus_per_rank=1).liger

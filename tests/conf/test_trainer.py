import pytest

from penstock.conf.errors import ConfigError
from penstock.conf.trainer import DeepSpeedConfig, LoraConfig, PolicyConfig, TrainerConfig


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


def test_policies_have_ranks_of_their_own_one_after_the_other():
    policies = {"solver": PolicyConfig(num_ranks=4), "proposer": PolicyConfig(num_ranks=2)}
    config = TrainerConfig(num_ranks=6, shard_size=2, policies=policies)
    assert config.policy_ranks == {"solver": range(4), "proposer": range(4, 6)}
    solver = config.of_policy("solver")
    assert (solver.num_ranks, solver.policy_ranks, solver.num_shares) == (4, {}, 4)
    assert config.alone().policy_ranks == {}
    assert TrainerConfig(policies={"solver": PolicyConfig(), "proposer": PolicyConfig()}).policy_ranks == {}


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


@pytest.mark.parametrize(
    ("options", "num_ranks"),
    [({"num_ranks": 1}, 1), ({"num_ranks": 6}, 2), ({"num_ranks": 32}, 8),
     ({"num_ranks": 8, "tensor_parallel_size": 4}, 2), ({"num_ranks": 6, "tensor_parallel_size": 2}, 1)],
)  # fmt: skip
def test_groups_are_chosen_within_the_largest_power_of_two_of_ranks(options, num_ranks):
    config = TrainerConfig(sequence_parallel_size="auto", **options)
    assert config.sequence_ranks == num_ranks
    assert config.ranks_per_row == num_ranks * config.tensor_parallel_size
    assert config.of_scorer("reference").sequence_ranks == num_ranks


@pytest.mark.parametrize(
    ("options", "heads", "sizes"),
    [({}, (28, 4), [1, 2, 4]), ({"tensor_parallel_size": 2}, (28, 4), [1, 2]), ({}, (14, 7), [1]),
     ({}, (32, 8), [1, 2, 4, 8]), ({"sequence_parallel_size": 4}, (28, 4), [4])],
)  # fmt: skip
def test_groups_have_sizes_that_divide_the_heads(options, heads, sizes):
    config = TrainerConfig(**{"num_ranks": 8, "sequence_parallel_size": "auto"} | options)
    assert config.split_sizes(heads) == sizes


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"packing": "never"}, r"packs the rows of a micro-batch, and trainer\.packing=never"),
        ({"engine": "deepspeed"}, r"sequence_parallel_size is for trainer\.engine=fsdp only"),
        ({"compile": True}, r"sequence_parallel_size=auto communicate inside"),
        ({"router_aux_loss_coef": 0.1}, r"routers are watched where they run"),
        ({"sequence_parallel_size": "some"}, r"sequence_parallel_size=some: must be a number, or auto"),
    ],
)
def test_settings_that_do_not_go_with_groups_by_length_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        TrainerConfig(**{"num_ranks": 2, "sequence_parallel_size": "auto"} | options)

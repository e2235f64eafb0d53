"""What a run's GPUs and nodes hold, what is chosen for them, and what is refused."""

import io
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from penstock.conf.errors import ResourceError
from penstock.conf.trainer import PolicyConfig
from penstock.orchestrator.cluster.placement.actors import needed
from penstock.orchestrator.cluster.placement.nodes import Node
from penstock.orchestrator.configuration.compose import load_config
from penstock.orchestrator.configuration.memory_view import (
    MemoryView,
    gpu_bytes,
    resolve_auto,
    with_memory,
)
from penstock.orchestrator.configuration.resolved import ResolvedRun, resolve
from penstock.orchestrator.configuration.run_memory import (
    GIB,
    PROCESS_BYTES,
    RunMemory,
    engine_memory,
    host_parts,
    reserved_bytes,
)
from penstock.orchestrator.configuration.validate import show_memory
from tests.orchestrator.configuration.memory import shapes
from tests.orchestrator.configuration.memory.test_rank_memory import shape_of

SHARED_GPU = ("rollout.num_gpus_per_worker=0.5", "trainer.num_gpus_per_rank=0.5")
SMALL, LARGE = "QWEN2_05B", "QWEN2_7B"


@pytest.fixture
def view(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., MemoryView]:
    """`view(model, *words)`: of recipe=gsm8k on GPUs of 79 GiB."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)

    def make(model: str, *words: str, gpu_gib: float | None = 79) -> MemoryView:
        (tmp_path / "config.json").write_text(json.dumps(getattr(shapes, model)))
        known = [f"cluster.gpu_memory_gib={gpu_gib}"] if gpu_gib else []
        config = load_config(["recipe=gsm8k", f"model.path={tmp_path}", *known, *words])
        return MemoryView.of(resolve(config))

    return make


def memory_of(view: MemoryView) -> RunMemory:
    assert view.memory is not None
    return view.memory


def test_an_engine_has_what_is_left_for_keys_and_values() -> None:
    config = load_config(["recipe=gsm8k", "rollout.tensor_parallel_size=2"]).rollout
    shape = shape_of(LARGE)
    engine = engine_memory(shape, config, 80 * GIB, 0.5)
    assert engine.weights == shape.num_parameters  # two bytes each, on two GPUs
    assert engine.cache == 40 * GIB - engine.weights - engine.step
    assert engine.cache_token == 2 * 28 * 512 * 2 / 2  # keys and values, layers, heads, bytes, GPUs
    assert engine.cache_tokens == int(engine.cache / engine.cache_token)
    on_cpu = engine_memory(shape, load_config(["rollout.kv_cache_gib=2", "recipe=gsm8k"]).rollout, 0, 0)
    assert on_cpu.cache == 2 * GIB


def test_a_quantised_engine_has_room_for_more_keys_and_values() -> None:
    """A byte for each weight of a layer, and two for those of embedding and output layer."""
    shape, options = shape_of(LARGE), "rollout.engine_options={quantization: fp8, kv_cache_dtype: fp8}"
    plain, small = (
        engine_memory(shape, load_config(["recipe=gsm8k", *words]).rollout, 80 * GIB, 0.5) for words in ([], [options])
    )
    layers = shape.num_layers * shape.layer_parameters
    assert plain.weights - small.weights == layers
    assert small.weights == layers + 2 * shape.root_parameters
    assert (small.step, small.cache_token) == (plain.step, plain.cache_token / 2)
    assert small.cache_tokens == pytest.approx(2 * (plain.cache + layers) / plain.cache_token, rel=1e-6)


def test_a_draft_model_takes_weights_and_keys_and_values_of_the_same_tokens(
    view: Callable[..., MemoryView], tmp_path: Path
) -> None:
    """Its weights and its two heads are split over two GPUs like those of the model."""
    (tmp_path / "draft").mkdir()
    (tmp_path / "draft" / "config.json").write_text(json.dumps(getattr(shapes, SMALL)))
    parts = "rollout.tensor_parallel_size=2"
    without, drafting, unknown = (
        view(LARGE, parts, f"model.paths.draft={tmp_path / name}", f"rollout.speculation.method={method}")
        for name, method in (("draft", "none"), ("draft", "draft"), ("missing", "draft"))
    )
    plain, engine = memory_of(without).engine, memory_of(drafting).engine
    assert plain is not None
    assert engine is not None
    assert engine.weights - plain.weights == shape_of(SMALL).num_parameters
    assert engine.cache_token - plain.cache_token == 2 * 24 * 128 * 2 / 2
    assert memory_of(unknown).engine == plain
    assert [shown.remarks()[2:] for shown in (without, drafting, unknown)] == [
        [],
        ["An engine's weights, keys and values are the draft model's, too."],
        ["The draft model is not counted: its sizes are unknown."],
    ]


def test_host_memory_by_hand(view: Callable[..., MemoryView]) -> None:
    shown = view(LARGE, "trainer.num_ranks=8", "rollout.num_workers=8")
    parameters = shape_of(LARGE).num_parameters
    parts = {part.name: (part.place, part.num_bytes) for part in host_parts(memory_of(shown), shown.plan)}
    assert parts["publications of the weights"] == ("/dev/shm", 2 * 2 * parameters)
    assert parts["buffers for weights from GPUs"] == ("pinned", 8 * 2**27)
    assert parts["copies of the state"] == ("/dev/shm", 2 * 12 * parameters)
    assert parts["copy that a checkpoint is written from"] == ("memory", 12 * parameters)
    assert parts["the model's files, while they are read"] == ("page cache", 2 * parameters)
    half = [actor for actor in shown.plan if actor.rank < 4 or actor.role != "trainer"]
    names = {part.name: part.num_bytes for part in host_parts(memory_of(shown), half, num_nodes=2)}
    assert names["copies of the state"] == names["copies of another node's state"] == 12 * parameters


def test_actors_reserve_what_they_hold_alone(view: Callable[..., MemoryView]) -> None:
    shown = view(LARGE, "trainer.num_ranks=8", "rollout.num_workers=8", "cluster.cpus_per_worker=4")
    config, memory = memory_of(shown).config, memory_of(shown)
    nodes = [Node("a", "a", "10.0.0.1", cpus=64, memory=1024 * GIB), Node("b", "b", "10.0.0.2", memory=GIB)]
    plan = with_memory(ResolvedRun(config, memory.flow, shown.plan), nodes)
    reserved = {actor.name: actor.memory for actor in plan}
    rank = 12 * shape_of(LARGE).num_parameters / 8 + 2**27
    assert reserved["Trainer-policy-0"] == int(rank)  # a checkpoint's copy, and buffers for weights from its GPU
    assert reserved["Rollout-0"] == reserved["Store"] == 0  # on its GPU; at most, by store.max_bytes
    off = replace(config, cluster=replace(config.cluster, reserve_memory=False))
    assert not any(actor.memory for actor in with_memory(ResolvedRun(off, memory.flow, shown.plan), nodes))


@pytest.mark.parametrize("gib", [1, 16])
def test_what_fits_by_cpus_fits_by_memory(view: Callable[..., MemoryView], gib: int) -> None:
    """A small machine refuses no run that it had room for before actors reserved memory."""
    words = ("trainer.num_gpus_per_rank=0", "rollout.num_gpus_per_worker=0", "rollout.kv_cache_gib=4", "plan=never")
    shown = view(LARGE, *words, "trainer.num_ranks=2")
    memory, cpus = memory_of(shown), needed(shown.plan)[0]
    nodes = [Node("a", "a", "10.0.0.1", cpus=cpus, memory=gib * GIB)]
    plan = with_memory(ResolvedRun(memory.config, memory.flow, shown.plan), nodes)
    assert 0 < sum(actor.memory for actor in plan) <= gib * GIB


@pytest.mark.parametrize("name", [SMALL, "QWEN25_VL_7B"])
def test_what_ranks_keep_of_pictures_is_counted_in_runs_that_have_any(
    view: Callable[..., MemoryView], name: str
) -> None:
    kept = []
    for number in (0, 2):
        shown = view(name, "trainer.num_ranks=8", f"rollout.max_pictures={number}")
        parts = {part.name: part.num_bytes for part in host_parts(memory_of(shown), shown.plan)}
        kept.append(parts.get("pictures that ranks have read, at most", 0.0))
    scorers = sum(actor.role == "scorer" for actor in shown.plan)
    assert kept == [0, (8 + scorers) * GIB]


@pytest.mark.parametrize(
    ("words", "is_there"),
    [
        (["max_staleness=1"], True),
        ([], False),
        (["max_staleness=1", "trainer.offload=true"], False),
        (["max_staleness=1", "weights.transport=nccl"], False),
    ],
)
def test_a_rank_has_a_copy_of_its_share_where_steps_go_on_while_it_is_published(
    view: Callable[..., MemoryView], words: list[str], is_there: bool
) -> None:
    eight = ["trainer.num_ranks=8", "trainer.activation_checkpointing=true", "trainer.max_tokens_per_microbatch=4096"]
    with_copy, without = (memory_of(view(LARGE, *eight, *more)) for more in (words, [*words, "max_staleness=0"]))
    copied = 2 * shape_of(LARGE).num_parameters / 8 if is_there else 0.0
    assert with_copy.ranks["policy"].parts["publication"] == copied
    assert with_copy.rank_bytes == without.rank_bytes + copied
    table = io.StringIO()
    Console(file=table, width=200).print(view(LARGE, *eight, *words).devices())
    assert ("publication" in table.getvalue()) is is_there


def test_ranks_make_room_in_host_memory_and_engines_only_beside_adapters(view: Callable[..., MemoryView]) -> None:
    parameters = shape_of(SMALL).num_parameters

    def parts(*words: str) -> dict[str, float]:
        shown = view(SMALL, *SHARED_GPU, *words)
        return {part.name: part.num_bytes for part in host_parts(memory_of(shown), shown.plan)}

    plain = parts("placement=colocated", "trainer.stay_on_device=false")
    assert plain["ranks, while engines have the GPUs"] == pytest.approx(12 * parameters)
    asleep = "weights of engines that sleep"
    assert asleep not in plain
    adapters = ("trainer.lora.rank=8", "trainer.lora.publish=adapter")
    assert parts("placement=colocated", *adapters)[asleep] == 2 * parameters
    assert asleep not in parts(*adapters)


def test_each_further_policy_is_an_adapter_more(view: Callable[..., MemoryView]) -> None:
    shown = view(SMALL, "trainer.num_ranks=2", "trainer.lora.rank=8", "trainer.lora.publish=adapter")
    one = memory_of(shown)
    trainer = replace(one.config.trainer, policies={"a": PolicyConfig(), "b": PolicyConfig()})
    two = replace(one, config=replace(one.config, trainer=trainer))
    adapter = shape_of(SMALL).adapter_parameters(8, ["all-linear"])
    before, after = ({part.name: part.num_bytes for part in host_parts(each, shown.plan)} for each in (one, two))
    more = {name: after[name] - before[name] for name in after if after[name] != before[name]}
    assert more == {
        "publications of the weights": 2 * 2 * adapter,
        "copies of the state": 2 * 12 * adapter,
        "copy that a checkpoint is written from": 12 * adapter,
    }
    assert two.ranks["policy"].total - one.ranks["policy"].total == pytest.approx((12 + 4) * adapter / 2, rel=0.3)


def test_each_further_policy_that_is_a_whole_model_is_a_model_more(view: Callable[..., MemoryView]) -> None:
    shown = view(SMALL, "trainer.num_ranks=2")
    one = memory_of(shown)
    trainer = replace(one.config.trainer, policies={"a": PolicyConfig(), "b": PolicyConfig()})
    two = replace(one, config=replace(one.config, trainer=trainer), shapes={**one.shapes, "b": shape_of(LARGE)})
    before, after = ({part.name: part.num_bytes for part in host_parts(each, shown.plan)} for each in (one, two))
    more = {name: after[name] - before[name] for name in after if after[name] != before[name]}
    large = shape_of(LARGE).num_parameters
    assert more == {
        "publications of the weights": 2 * 2 * large,
        "copies of the state": 2 * 12 * large,
        "copy that a checkpoint is written from": 12 * large,
        "the model's files, while they are read": 2 * large,
    }
    assert list(two.ranks) == ["a", "b"]
    assert two.ranks["a"].resident == one.ranks["policy"].resident
    assert two.resident_bytes == pytest.approx(one.resident_bytes + 12 * large / 2, rel=0.1)
    assert one.engine is not None
    assert two.engine is not None
    assert two.engine.weights == 2 * large  # the largest


def test_ranks_of_its_own_have_a_policy_alone_as_if_there_was_no_other(view: Callable[..., MemoryView]) -> None:
    shown = view(SMALL, "trainer.num_ranks=3", "trainer.num_gpus_per_rank=0", "rollout.num_gpus_per_worker=0")
    one = memory_of(shown)
    policies = {"a": PolicyConfig(num_ranks=1), "b": PolicyConfig(num_ranks=2)}
    config = replace(one.config, trainer=replace(one.config.trainer, policies=policies))
    both = replace(one, config=config, shapes={**one.shapes, "b": shape_of(LARGE)})
    alone = {}
    for name, num_ranks in {"a": 1, "b": 2}.items():
        trainer = replace(one.config.trainer, num_ranks=num_ranks)
        shape = both.policies[name]
        alone[name] = replace(one, config=replace(one.config, trainer=trainer), shapes={"policy": shape})
        assert both.ranks[name] == alone[name].ranks["policy"]
    assert both.rank_bytes == alone["b"].rank_bytes
    assert both.resident_bytes == alone["b"].resident_bytes
    assert both.trained_bytes == alone["b"].trained_bytes
    parts = {part.name: part.num_bytes for part in host_parts(both, shown.plan)}
    assert parts["a: all of its ranks"] == both.ranks["a"].total
    assert parts["b: all of its ranks"] == 2 * both.ranks["b"].total
    (first, *_, last) = [actor for actor in shown.plan if actor.role == "trainer"]
    assert reserved_bytes(both, last) > 2 * reserved_bytes(both, first)


def test_activations_that_wait_on_the_host_are_its_and_layers_are_recomputed(view: Callable[..., MemoryView]) -> None:
    words = ("trainer.num_ranks=8", "rollout.num_workers=8", "trainer.max_tokens_per_microbatch=16384")
    shown = view(LARGE, *words, "trainer.activation_offload=true")
    there = memory_of(view(LARGE, *words, "trainer.activation_checkpointing=true")).ranks["policy"]
    waits = memory_of(shown).ranks["policy"]
    assert memory_of(shown).config.trainer.activation_checkpointing is True
    inputs, last = 28 * 16384 * 3584 * 2, 16384 * 3584 * (4 + 2 + 2 * 2)  # of layers; of the last norm and the head
    assert waits.activations_on_host == inputs + last
    assert there.activations_on_host == 0
    assert waits.total < there.total - 0.8 * inputs
    parts = {part.name: (part.place, part.num_bytes) for part in host_parts(memory_of(shown), shown.plan)}
    at_most = 8 * waits.activations_on_host
    assert parts["activations (trainer.activation_offload), at most"] == ("pinned", at_most)


def test_large_micro_batches_without_recomputing_are_chosen_where_they_fit(view: Callable[..., MemoryView]) -> None:
    small = memory_of(view(SMALL)).config
    assert (small.trainer.activation_checkpointing, small.trainer.max_tokens_per_microbatch) == (False, 32768)
    assert small.rollout.gpu_memory_utilization == 0.9
    tight = memory_of(view(SMALL, gpu_gib=12)).config
    assert tight.trainer.activation_checkpointing is True
    assert 1024 <= tight.trainer.microbatch_tokens < 32768


@pytest.mark.parametrize("words", [(), SHARED_GPU, ("placement=colocated", *SHARED_GPU)])
@pytest.mark.parametrize("model", [SMALL, LARGE])
def test_what_is_chosen_fits(model: str, words: tuple[str, ...], view: Callable[..., MemoryView]) -> None:
    shown = view(model, "trainer.num_ranks=8", "rollout.num_workers=8", *words)
    memory = memory_of(shown)
    memory.check()
    assert all(peak <= 79 * GIB for peak in memory.peaks().values())
    assert len(shown.chosen) == 3 + ("placement=colocated" in words)


def test_what_routed_experts_take_of_the_store_is_told(view: Callable[..., MemoryView]) -> None:
    words = ("rollout.router_replay=true", "rollout.max_model_len=8192", "rollout.sampling.max_tokens=4096")
    told = view("QWEN3_30B_A3B", *words).remarks()[-1]
    assert told == (
        "Routed experts are 384 bytes a token, 3.0 MiB a longest sequence: store.max_bytes has room for those of 1,365."
    )
    assert "experts" not in view("QWEN3_30B_A3B").remarks()[-1]


def test_states_stay_on_a_gpu_that_has_room_for_both(view: Callable[..., MemoryView]) -> None:
    shown = view(LARGE, *TURNS)
    memory = memory_of(shown)
    engine, resident = memory.engine, memory.resident_bytes
    assert engine is not None
    assert shown.chosen[0] == "trainer.stay_on_device=true"
    assert resident == pytest.approx(12 * shape_of(LARGE).num_parameters / 8)
    (peak,) = memory.peaks().values()
    assert peak >= engine.total + resident + 2 * PROCESS_BYTES
    assert engine.cache_tokens >= memory.config.algorithm.group_size * memory.config.rollout.max_model_len
    host = {part.name for part in host_parts(memory, shown.plan)}
    assert WAITING not in host
    leaving = view(LARGE, *TURNS, "trainer.stay_on_device=false")
    assert WAITING in {part.name for part in host_parts(memory_of(leaving), leaving.plan)}
    with_more = memory_of(leaving).engine
    assert with_more is not None
    assert with_more.cache > engine.cache


@pytest.mark.parametrize(
    "words",
    [
        ("trainer.num_ranks=2", "rollout.num_workers=2", "trainer.groups_per_step=32"),  # 43 GiB of states
        ("rollout.max_model_len=131072", "rollout.sampling.max_tokens=100000", "rollout.num_workers=1"),
    ],
)
def test_states_leave_where_the_engine_would_lack_keys_and_values(
    words: tuple[str, ...], view: Callable[..., MemoryView]
) -> None:
    assert memory_of(view(LARGE, *TURNS, *words)).config.trainer.stay_on_device is False


def test_states_that_are_told_to_stay_and_do_not_fit_are_refused(view: Callable[..., MemoryView]) -> None:
    words = ("trainer.stay_on_device=true", "trainer.num_ranks=1", "rollout.num_workers=1")
    with pytest.raises(ResourceError, match=r"trainer\.stay_on_device=false"):
        view(LARGE, *TURNS, *words, gpu_gib=110).summary()


def test_only_turns_on_gpus_of_known_memory_choose_whether_states_stay(view: Callable[..., MemoryView]) -> None:
    for words, gpu_gib in (((), 79), (TURNS, None), (SHARED_GPU, 79)):
        trainer = memory_of(view(SMALL, *words, gpu_gib=gpu_gib)).config.trainer
        assert trainer.stay_on_device == "auto"
        assert not trainer.stays_on_device


WAITING = "ranks, while engines have the GPUs"
TURNS = ("placement=colocated", "rollout.num_workers=8", "trainer.num_ranks=8", *SHARED_GPU)
KL = "algorithm.kl_coef=0.01"


@pytest.mark.parametrize("model", [LARGE, "QWEN3_30B_A3B"])
def test_a_gpu_holds_a_rank_an_engine_and_a_scorer_in_turns(view: Callable[..., MemoryView], model: str) -> None:
    words = (*TURNS, "rollout.num_workers=4", "rollout.tensor_parallel_size=2")
    memory = memory_of(view(model, *words, KL))
    memory.check()
    scorer, engine = memory.ranks["Scorer-reference"], memory.engine
    assert engine is not None
    trains = memory.rank_bytes + 7 * GIB  # three processes, and what an engine keeps that sleeps
    loads = memory.resident_bytes + engine.weights + 7 * GIB
    generates = engine.total + scorer.total + memory.staying_bytes + 6 * GIB
    assert memory.peaks() == {"rank, engine and scorer, in turns": max(trains, loads, generates)}
    assert generates <= 0.93 * 79 * GIB
    alone = memory_of(view(model, *words)).engine
    assert alone is not None
    assert engine.total < alone.total


def test_an_engine_whose_share_leaves_no_room_for_a_scorer_is_refused(view: Callable[..., MemoryView]) -> None:
    words = (*TURNS, "rollout.gpu_memory_utilization=0.92")
    view(LARGE, *words).summary()
    with pytest.raises(ResourceError, match=r"rank, engine and scorer, in turns: .* Lower rollout\.gpu_memory_"):
        view(LARGE, *words, KL).summary()


def test_weights_in_gpu_memory_leave_rank_engine_and_scorer_there_together(view: Callable[..., MemoryView]) -> None:
    memory = memory_of(view(SMALL, *SHARED_GPU, KL, "weights.transport=ipc"))
    scorer, bucket = memory.ranks["Scorer-reference"].total, memory.config.weights.bucket_mib * 2**20
    together = memory.rank_bytes + memory.engine_bytes + scorer + 4 * GIB + bucket
    assert memory.peaks() == {"rank, engine and scorer together": together}


def test_a_scorer_that_leaves_its_gpu_waits_in_host_memory(view: Callable[..., MemoryView]) -> None:
    shown = view(LARGE, *TURNS, KL)
    parts = {part.name: part.num_bytes for part in host_parts(memory_of(shown), shown.plan)}
    assert parts["Scorer-reference, while ranks have the GPUs"] == 2 * shape_of(LARGE).num_parameters
    apart = view(LARGE, "trainer.num_ranks=8", KL)
    assert not [part for part in host_parts(memory_of(apart), apart.plan) if "Scorer" in part.name]


def test_a_scorer_of_fewer_ranks_has_more_weights_on_each(view: Callable[..., MemoryView]) -> None:
    words = ("trainer.num_ranks=8", KL)
    ways = ((), ("trainer.num_scorer_ranks=2",), ("trainer.scorer_ranks={reference: 2}",))
    eight, two, named = (memory_of(view(LARGE, *words, *more)) for more in ways)
    assert named.ranks == two.ranks
    assert two.ranks["policy"] == eight.ranks["policy"]
    weights = [memory.ranks["Scorer-reference"].parts["weights"] for memory in (two, eight)]
    assert weights[0] == 4 * weights[1] == shape_of(LARGE).num_parameters


def test_what_is_set_stays_as_it_is(view: Callable[..., MemoryView]) -> None:
    words = (
        "rollout.gpu_memory_utilization=0.4", "trainer.activation_checkpointing=true",
        "trainer.max_tokens_per_microbatch=4096",
    )  # fmt: skip
    shown = view(SMALL, *words)
    config = memory_of(shown).config
    assert shown.chosen == []
    assert (config.rollout.gpu_share, config.trainer.microbatch_tokens) == (0.4, 4096)
    assert config.trainer.recomputes_layers


def test_without_a_known_gpu_keys_have_their_defaults(
    view: Callable[..., MemoryView], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    shown = view(SMALL, gpu_gib=None)
    config = memory_of(shown).config
    assert (config.rollout.gpu_share, config.trainer.microbatch_tokens, config.trainer.recomputes_layers) == (
        0.5, 8192, True,
    )  # fmt: skip
    assert "cluster.gpu_memory_gib" in shown.summary()
    on_cpu = load_config(["recipe=gsm8k", "model=tiny"])
    assert (on_cpu.trainer.microbatch_tokens, on_cpu.trainer.recomputes_layers) == (8192, False)


@pytest.mark.parametrize(
    ("words", "keys"),
    [
        ((), ("rank: 12", "trainer.num_ranks", "trainer.offload", "trainer.lora.rank")),
        (
            ("trainer.num_ranks=8", "trainer.activation_checkpointing=false",
             "trainer.max_tokens_per_microbatch=65536"),
            ("trainer.activation_checkpointing=true", "trainer.max_tokens_per_microbatch=65536, to 2048 at least"),
        ),
        (("trainer.num_ranks=8", "rollout.gpu_memory_utilization=0.1"), ("rollout.gpu_memory_utilization=0.1",)),
        (("trainer.lora.rank=8", "rollout.gpu_memory_utilization=0.9", *SHARED_GPU), ("rank and engine together",)),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_with_the_keys(
    words: tuple[str, ...], keys: tuple[str, ...], view: Callable[..., MemoryView]
) -> None:
    with pytest.raises(ResourceError) as caught:
        view(LARGE, *words).summary()
    assert all(key in str(caught.value) for key in keys), caught.value


def test_a_run_on_a_cluster_takes_what_its_gpus_have(view: Callable[..., MemoryView]) -> None:
    shown, told = view(SMALL, gpu_gib=None), list[str]()
    node = Node("a", "host", "10.0.0.1", 8, 8, {"ray.io/accelerator-type": "H100"})
    config = memory_of(shown).config
    assert gpu_bytes(config, [node, node]) == 79.1 * GIB
    asked = ResolvedRun(config, memory_of(shown).flow, list(shown.plan))
    result = resolve_auto(asked, [node, node], told.append).config
    assert result.trainer.max_tokens_per_microbatch == 32768
    assert "trainer.max_tokens_per_microbatch=32768" in told[0]
    two_sizes = Node("b", "other", "10.0.0.2", 8, 8, {"ray.io/accelerator-type": "A100"})
    assert gpu_bytes(config, [node, two_sizes]) is None


def test_a_node_that_no_actor_with_a_gpu_may_get_says_nothing(view: Callable[..., MemoryView]) -> None:
    shown = view(SMALL, "cluster.labels.trainer={kind: large}", "cluster.labels.rollout={kind: large}", gpu_gib=None)
    nodes = [Node(name, name, "10.0.0.1", 8, 8, {"ray.io/accelerator-type": name, "kind": kind})
             for name, kind in (("H100", "large"), ("L4", "small"))]  # fmt: skip
    config = memory_of(shown).config
    assert gpu_bytes(config, nodes, shown.plan) == 79.1 * GIB
    assert gpu_bytes(config, nodes) == 22.1 * GIB


def test_a_model_of_another_kind_is_no_fault(view: Callable[..., MemoryView], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shapes, "OTHER", {"model_type": "mamba"}, raising=False)
    shown = view("OTHER")
    assert "is of type 'mamba', of which transformers makes no decoder" in shown.summary()
    assert shown.devices() is None


def test_tables_can_be_read_in_a_terminal_of_80_columns(view: Callable[..., MemoryView]) -> None:
    console = Console(width=80, record=True, file=open("/dev/null", "w"))  # noqa: SIM115 - closed with the process
    show_memory(view(SMALL, "algorithm.kl_coef=0.1"), console)
    text = console.export_text()
    lines: dict[str, Any] = {line.split("  ")[0].strip(): line.split() for line in text.splitlines()}
    assert lines["GiB of one GPU"][-3:] == ["policy", "Scorer-reference", "engine"]
    assert float(lines["peak"][1]) == pytest.approx(sum(float(lines[name][-3]) for name in PARTS), abs=0.4)
    assert "…" not in text


PARTS = ("weights", "gathered weights", "gradients", "moments", "activations", "logits")


def test_groups_by_length_have_the_budget_of_tokens_for_each_rank(view: Callable[..., MemoryView]) -> None:
    words = ("trainer.num_ranks=8", "trainer.max_tokens_per_microbatch=4096")
    alone, by_length = (
        memory_of(view(LARGE, *words, f"trainer.sequence_parallel_size={size}")) for size in ("1", "auto")
    )
    activations = alone.ranks["policy"].parts["activations"]
    assert by_length.ranks["policy"].parts["activations"] == pytest.approx(activations)
    split = memory_of(view(LARGE, *words, "trainer.sequence_parallel_size=auto", "rollout.max_model_len=32768"))
    assert split.ranks["policy"].parts["activations"] == pytest.approx(2 * activations, rel=0.05)

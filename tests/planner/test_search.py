"""The search finds plans that fit and can be run, and more of a resource never makes the best of them slower."""

import re
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from penstock.algorithms.catalogue import dataflow_of
from penstock.algorithms.graph.dataflow import Dataflow
from penstock.algorithms.losses import sft_loss
from penstock.cli.main import main
from penstock.conf.errors import ConfigError, ResourceError
from penstock.orchestrator.cluster.placement.nodes import Node
from penstock.orchestrator.configuration import prerequisites
from penstock.orchestrator.configuration.compose import load_config
from penstock.orchestrator.configuration.memory_view import required_host_bytes
from penstock.orchestrator.configuration.prerequisites import check_packages
from penstock.orchestrator.configuration.resolved import ResolvedRun, resolve
from penstock.orchestrator.configuration.run_memory import RunMemory
from penstock.orchestrator.configuration.validate import checks
from penstock.planner.candidates import with_keys
from penstock.planner.hardware import KINDS, with_prices
from penstock.planner.lengths import Turns
from penstock.planner.plan_inputs import (
    lengths_of,
    nodes_by_kind,
    overrides_of,
    parse_hours,
    search_of,
    turns_of,
    uncounted_keys,
)
from penstock.planner.search import Plan, Search, changes_that_fit, cheapest, find_speedups, plan_of

H100 = KINDS["h100"]
WORDS = ("recipe=gsm8k", "model.path=Qwen/Qwen2.5-7B-Instruct", "rollout.max_model_len=4608",
         "rollout.sampling.max_tokens=4096", "trainer.groups_per_step=32")  # fmt: skip


@cache
def searched(cluster: str, *words: str) -> Search:
    return search_of(load_config([*WORDS, *words]), cluster, "1000")


def test_plans_fit_and_are_sorted_by_seconds() -> None:
    search = searched("2x8:h100")
    assert search.plans
    assert [plan.step_s for plan in search.plans] == sorted(plan.step_s for plan in search.plans)
    for plan in search.plans:
        plan.memory.check()
        assert plan.candidate.num_gpus <= 16
        assert max(plan.memory.peaks().values()) <= 79.1 * 2**30


@pytest.mark.parametrize("more", ["2x8:h200", "3x8:h100", "2x8:h100,1x8:h100"])
def test_more_of_a_resource_never_makes_the_best_plan_slower(more: str) -> None:
    assert searched(more).plans[0].step_s <= searched("2x8:h100").plans[0].step_s * 1.001


def test_a_step_more_of_staleness_never_makes_the_best_plan_slower() -> None:
    seconds = [searched("2x8:h100", f"max_staleness={number}").plans[0].step_s for number in range(3)]
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[1] < seconds[0] * 0.8, "what takes turns is idle half of the time"


def test_a_plan_that_is_said_is_the_run_that_is_loaded() -> None:
    """Its keys on a command line give the configuration that was estimated."""
    for cluster in ("2x8:h100", "1x8:h100,2x8:l40s"):
        search = searched(cluster, "max_staleness=1")
        for plan in search.best()[:4]:
            keys = overrides_of(search.base, plan.candidate.keys)
            loaded = load_config([*WORDS, "max_staleness=1", *keys])
            assert loaded == plan.candidate.config(search.base)


def test_plans_offload_only_where_weights_do_not_fit_otherwise() -> None:
    search = search_of(load_config([*WORDS[:1], "model.path=Qwen/Qwen3-8B", *WORDS[2:]]), "1x8:h100", "1000")
    assert [plan.config.trainer.offload for plan in search.best()] == [False] * len(search.best())


@pytest.mark.parametrize("words", [(), ("max_staleness=1",)])
def test_an_ordinary_plan_is_preferred_to_one_that_may_be_as_fast(words: tuple[str, ...]) -> None:
    """Rows of 355 tokens gain nothing by being split over ranks."""
    short = ["recipe=gsm8k", "model.path=Qwen/Qwen2.5-7B-Instruct", *words]
    search = search_of(load_config(short), "1x8:h100", "205")
    best = plan_of(search)
    assert best.step_s <= search.plans[0].step_s * 1.05
    assert best.config.trainer.ranks_per_row == 1
    near = [plan for plan in search.plans if plan.step_s <= search.plans[0].step_s * 1.05]
    parts = [plan.config.rollout.tensor_parallel_size for plan in near if plan.config.trainer.ranks_per_row == 1]
    assert best.config.rollout.tensor_parallel_size == min(parts)


def test_groups_by_length_that_are_asked_for_are_planned() -> None:
    search = searched("1x8:h100", "trainer.sequence_parallel_size=auto")
    assert search.plans
    assert all(plan.config.trainer.splits_by_length for plan in search.plans)
    plan_of(search).memory.check()


def test_no_plan_names_a_package_that_is_not_installed() -> None:
    for plan in searched("2x8:h100", "max_staleness=1").plans:
        check_packages(plan.config)
        assert "model.attention" not in dict(plan.candidate.keys)


@pytest.mark.parametrize(("word", "package"), [
    ("model.attention=flash_attention_2", "flash-attn"), ("trainer.liger=true", "liger-kernel"),
])  # fmt: skip
def test_kernels_that_are_not_installed_are_refused_before_a_run(
    word: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load_config([*WORDS, word])
    found = {one.name: one for one in checks(ResolvedRun(config, dataflow_of(config), []))}["packages"]
    monkeypatch.setattr(prerequisites, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=f"{word} needs the package {package}, which is not installed here"):
        found.look()
    monkeypatch.setattr(prerequisites, "find_spec", lambda name: object())
    assert found.look() == package


def test_ranks_go_to_one_kind_and_engines_to_what_is_left() -> None:
    search = searched("1x8:h100,2x8:l40s", "max_staleness=1")
    best = plan_of(search)
    assert dict(best.candidate.keys)["cluster.labels"]["trainer"] == {
        "ray.io/accelerator-type": best.candidate.ranks.ray_name
    }
    alone = [searched(part, "max_staleness=1").plans[0].step_s for part in ("1x8:h100", "2x8:l40s")]
    assert best.step_s < min(alone)


KL = "algorithm.kl_coef=0.01"


def apart(search: Search) -> list[Plan]:
    """Plans whose engines, ranks and scorers have GPUs of their own, fastest first."""
    return [plan for plan in search.plans if plan.config.placement == "disaggregated"]


def ranks_of(plan: Plan, scorer: str) -> int:
    return plan.config.trainer.of_scorer(scorer).num_ranks


def test_a_reference_has_no_more_gpus_than_it_needs() -> None:
    """Its forward pass takes a quarter of an update."""
    plans = apart(searched("1x8:h100", "max_staleness=1", KL))
    even = [plan for plan in plans if ranks_of(plan, "reference") == plan.config.trainer.num_ranks]
    assert ranks_of(plans[0], "reference") < plans[0].config.trainer.num_ranks
    assert plans[0].step_s < 0.95 * even[0].step_s
    assert all(plan.candidate.num_gpus <= 8 for plan in plans)


@pytest.mark.parametrize("word", ["trainer.scorer_ranks={reference: 2}", "trainer.num_scorer_ranks=2"])
def test_a_number_of_scorers_ranks_that_is_given_stays(word: str) -> None:
    search = replace(searched("1x8:h100", KL, word), given=frozenset({"trainer.scorer_ranks.reference"}))
    assert {ranks_of(plan, "reference") for plan in apart(search)} == {2}


def test_a_larger_scorer_has_more_ranks() -> None:
    """A reward model of 7B beside a policy of 1.5B, whose reference is as small."""
    words = ["recipe=gsm8k", "model.path=Qwen/Qwen2.5-1.5B", "algorithm=ppo", "algorithm.reward_model=true", KL]
    search = search_of(load_config([*words, *WORDS[2:]]), "2x8:h100", "1000")
    shapes = {**search.shapes, "reward_model": searched("2x8:h100").shapes["policy"]}
    plans = apart(replace(search, shapes=shapes))
    assert ranks_of(plans[0], "reward_model") > ranks_of(plans[0], "reference")
    assert plans[0].work.stages[:2] == (
        ("reference", ranks_of(plans[0], "reference")), ("reward_model", ranks_of(plans[0], "reward_model")),
    )  # fmt: skip


LONG = ("rollout.max_model_len=32768", "rollout.sampling.max_tokens=30720")


def config_words(model: str, words: tuple[str, ...]) -> list[str]:
    return [*WORDS[:1], f"model.path={model}", *WORDS[2:], *words]


@pytest.mark.parametrize(("model", "words", "cluster", "named"), [
    ("Qwen/Qwen2.5-14B", (), "1x1:l4", ["a cluster of 1x4:l4", "a cluster of 1x1:a100-40gb"]),
    ("Qwen/Qwen2.5-7B", ("trainer.activation_checkpointing=false", *LONG), "1x1:l40s",
     ["trainer.activation_checkpointing=true", "rollout.max_model_len=4096 rollout.sampling.max_tokens=3840"]),
])  # fmt: skip
def test_where_nothing_fits_it_says_what_would(
    model: str, words: tuple[str, ...], cluster: str, named: list[str]
) -> None:
    """And each that is named does."""
    search = search_of(load_config(config_words(model, words)), cluster, None)
    with pytest.raises(ResourceError, match=re.escape(f"Nothing fits {cluster}. One of these would: ")) as error:
        plan_of(search)
    changes = changes_that_fit(search)
    assert set(named) <= set(changes)
    for one in changes:
        assert one in str(error.value)
        larger = one.removeprefix("a cluster of ")
        keys = one.split() if larger == one else []
        other = larger if larger != one else cluster
        assert search_of(load_config(config_words(model, (*words, *keys))), other, None).fits


LARGE = ("recipe=gsm8k", "model.path=Qwen/Qwen2.5-72B", *WORDS[2:])


def test_a_plan_says_what_it_takes_of_the_host(capsys: pytest.CaptureFixture[str]) -> None:
    """All of 72.7B parameters' weights and moments are offloaded, 12 bytes each."""
    plan = plan_of(search_of(load_config([*LARGE]), "1x8:h100", "1000"))
    assert plan.config.trainer.offload
    assert required_host_bytes(plan.host) > 12 * 72.7e9
    assert main(["plan", *LARGE, "--cluster", "1x8:h100", "--lengths", "1000"]) == 0
    said = capsys.readouterr().out
    assert "host" in said
    assert f" {required_host_bytes(plan.host) / 2**30:,.0f} " in said


def test_a_plan_that_the_host_has_no_room_for_is_none() -> None:
    search = search_of(load_config([*LARGE]), "1x8:h100", "1000")
    (nodes,) = search.cluster
    small = replace(search, cluster=(replace(nodes, host_bytes=512 * 2**30),))
    with pytest.raises(ResourceError, match=r"GiB of host memory, and a node has 512\.0"):
        small.plan(plan_of(search).candidate)


def test_a_plan_costs_what_its_gpus_do_and_the_cheapest_is_found() -> None:
    whole = searched("1x8:h100,1x8:a100", "max_staleness=1")
    hours = plan_of(whole).step_s * whole.base.trainer.max_steps / 3600 * 20
    for text, kind in (("h100=1,a100=9", "h100"), ("h100=9,a100=1", "a100")):
        priced = replace(whole, cluster=with_prices(whole.cluster, text))
        found = cheapest(priced, hours)
        assert [nodes.kind.name for nodes in found.cluster] == [kind]
        assert found.plans[0].cost == pytest.approx(found.plans[0].gpu_hours)
    even, uneven = (
        replace(whole, cluster=with_prices(whole.cluster, text)) for text in ("h100=2,a100=2", "h100=4,a100=2")
    )
    for plan, dearer in zip(even.best(), uneven.best(), strict=True):
        assert plan.cost == pytest.approx(2 * plan.gpu_hours)
        on_h100 = dearer.cost / plan.cost - 1
        assert (on_h100 > 0) == (
            "h100" in {plan.candidate.ranks.name, *(kind.name for kind, _ in plan.candidate.engines)}
        )
        assert on_h100 < 1 + 1e-9
    assert plan_of(whole).cost == 0
    assert [plan.step_s for plan in even.best()] == [plan.step_s for plan in whole.best()]


def test_the_cheapest_part_that_is_done_in_time_is_found() -> None:
    whole = searched("4x8:h100")
    hours = whole.plans[0].step_s * 200 / 3600
    assert cheapest(whole, hours * 1.01).cluster[0].count <= 4
    slow = cheapest(whole, hours * 20)
    assert slow.cluster[0].num_gpus < 32
    assert slow.plans[0].gpu_hours <= whole.plans[0].gpu_hours
    with pytest.raises(ResourceError, match=r"trainer\.max_steps=200 takes"):
        cheapest(whole, hours * 0.5)


def test_the_next_better_class_is_named() -> None:
    found = dict(find_speedups(searched("2x8:h100")))
    assert list(found) == ["max_staleness=1", "a cluster of 3x8:h100"]


def test_what_a_cluster_has_is_known_by_rays_labels() -> None:
    nodes = [Node(str(n), f"n{n}", f"10.0.0.{n}", 64, 8, {"ray.io/accelerator-type": "H100"}) for n in range(2)]
    (held,) = nodes_by_kind([replace(node, memory=size) for node, size in zip(nodes, (2e12, 1e12), strict=True)])
    assert held.host_bytes == 1e12
    assert [str(one) for one in nodes_by_kind([Node("d", "d", "10.0.0.9", 8), *nodes])] == ["2x8:h100"]
    with pytest.raises(ResourceError, match="--cluster 2x8:h100"):
        nodes_by_kind([Node("d", "d", "10.0.0.9", 8)])
    with pytest.raises(ResourceError, match=r"accelerator-type=MI300X"):
        nodes_by_kind([Node("d", "d", "10.0.0.9", 8, 8, {"ray.io/accelerator-type": "MI300X"})])


def test_what_is_asked_wrongly_is_refused_by_name() -> None:
    config = load_config(list(WORDS))
    with pytest.raises(ConfigError, match="--lengths 'many'"):
        lengths_of(config, "many")
    with pytest.raises(ConfigError, match="--within"):
        parse_hours("12")
    with pytest.raises(ConfigError, match=r"config\.json"):
        search_of(load_config([*WORDS[:1], "model.path=someone/else"]), "1x8:h100", None)


def test_turns_are_asked_for_or_usual_ones_of_an_environment() -> None:
    config = load_config(list(WORDS))
    assert turns_of(config, None) == Turns()
    assert turns_of(config, "6:2.5:300") == Turns(6, added=300, wait_s=2.5)
    without = load_config([*WORDS, "rollout.engine_options={enable_prefix_caching: false}"])
    assert turns_of(without, "6:2.5") == Turns(6, added=100, wait_s=2.5, reread=1.0)
    played = load_config([*WORDS, "environment.name=tools", "environment.max_turns=10"])
    assert turns_of(played, None) == Turns(4, added=100)
    for text in ("many", "0", "4:-1", "1:2:3:4", ""):
        with pytest.raises(ConfigError, match=f"--turns '{text}'"):
            turns_of(config, text)


def test_a_plan_of_several_turns_says_them(capsys: pytest.CaptureFixture[str]) -> None:
    words = [*WORDS, "--cluster", "1x4:h100", "--lengths", "1000"]
    seconds = []
    for more in ([], ["--turns", "6:20:300"]):
        assert main(["plan", *words, *more]) == 0
        said = capsys.readouterr().out
        seconds.append(float(re.findall(r": ([\d.]+) s a step", said)[0]))
    assert "An attempt has 6.0 turns; before each further one its environment adds 300 tokens and takes 20.0 s" in said
    assert "were played by the simulator" not in said
    assert seconds[1] > seconds[0] + 5 * 20


def test_keys_that_no_plan_counts_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["trainer.compile=true", "trainer.activation_offload=true", "+rollout.engine_options.quantization=online",
             "+rollout.engine_options.kv_cache_dtype=fp8", "rollout.speculation.method=ngram"]  # fmt: skip
    assert uncounted_keys(load_config([*WORDS])) == []
    assert uncounted_keys(load_config([*WORDS, "rollout.engine_options={quantization: fp8}"])) == []
    told = ["trainer.compile=true", "trainer.activation_offload=true", "rollout.speculation.method=ngram",
            "rollout.engine_options.quantization=online"]  # fmt: skip
    assert uncounted_keys(load_config([*WORDS, *words])) == told
    assert main(["plan", *WORDS, *words, "--cluster", "1x2:h100", "--lengths", "1000"]) == 0
    assert f"Not counted: {', '.join(told)}." in capsys.readouterr().out


def test_keys_change_what_they_name_and_nothing_else() -> None:
    config = load_config(list(WORDS))
    changed = with_keys(config, {"max_staleness": 2, "trainer.num_ranks": 4, "cluster.labels": {}})
    assert (changed.max_staleness, changed.trainer.num_ranks) == (2, 4)
    assert replace(changed, max_staleness=0, trainer=config.trainer) == config
    with pytest.raises(ConfigError):
        with_keys(config, {"trainer.num_ranks": 3, "trainer.tensor_parallel_size": 2})


def test_the_command_says_the_plan_why_others_lost_and_how_to_run_it(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "keys"
    assert main(["plan", *WORDS, "--cluster", "2x8:h100", "--lengths", "1000:0.8", "--write", str(file)]) == 0
    said = capsys.readouterr().out
    assert "The best is" in said
    assert "x the time:" in said
    assert "With max_staleness=1 a step would take about" in said
    assert f"penstock run {' '.join(file.read_text().split())}" in said
    assert dataflow_of(load_config(file.read_text().split()))
    assert main(["plan", *WORDS, "--cluster", "2x8:h10"]) == 2


MODELS = (
    "environment.name=recipes/guess/game.py:Guess", "data.source=environment", "algorithm.name=grpo",
    "model.path=Qwen/Qwen2.5-7B-Instruct", "model.paths.proposer=Qwen/Qwen2.5-0.5B", "rollout.num_workers=2",
    "rollout.max_model_len=4608", "rollout.sampling.max_tokens=4096", "trainer.groups_per_step=32",
)  # fmt: skip


def planned(*words: str) -> Search:
    flow = Dataflow().rollout("solver", samples_per_prompt=8).reward()
    run = resolve(load_config([*MODELS, *words]), flow.train("solver", loss=sft_loss).train("proposer", loss=sft_loss))
    return search_of(run.config, "1x8:h100", "1000", flow=run.flow, turns="1")


def test_whole_models_are_updated_one_after_the_other_or_side_by_side() -> None:
    search = planned()
    best = plan_of(search)
    assert best.config.rollout.num_workers >= 2
    lengths = [[1000] * 64] * best.config.trainer.num_ranks
    alone = search.durations(replace(best.memory, config=best.config), H100, H100)
    halves = [[1000] * 32] * best.config.trainer.num_ranks
    seconds = {
        name: replace(alone, memory=one_policy(best.memory, name)).update_s(halves) for name in ("solver", "proposer")
    }
    assert alone.update_s(lengths) == pytest.approx(sum(seconds.values()))
    assert seconds["solver"] > seconds["proposer"] > 0


def test_ranks_of_its_own_train_a_policy_beside_the_others() -> None:
    own = ("trainer.policies.solver.num_ranks=4", "trainer.policies.proposer.num_ranks=1", "trainer.num_ranks=5")
    search = planned(*own)
    plan_of(search).memory.check()
    assert {plan.config.trainer.num_ranks for plan in search.plans} == {5}
    assert {plan.config.placement for plan in search.plans} == {"disaggregated"}
    memory = search.plans[0].memory
    found = search.durations(memory, H100, H100)
    rows = 5 * 8
    solver, proposer = (one_policy(memory, name) for name in ("solver", "proposer"))
    assert found.update_s([[1000] * 8] * 5) == pytest.approx(
        max(
            replace(found, memory=solver).update_s([[1000] * (rows // 2 // 4)]),
            replace(found, memory=proposer).update_s([[1000] * (rows // 2)]),
        )
    )


def one_policy(memory: RunMemory, name: str) -> RunMemory:
    """The run of one of its policies alone."""
    trainer = memory.config.trainer.of_policy(name)
    return replace(
        memory,
        config=replace(memory.config, trainer=trainer),
        shapes={**memory.shapes, "policy": memory.policies[name]},
    )

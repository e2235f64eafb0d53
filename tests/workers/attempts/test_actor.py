"""What the shell around an environment makes of its configuration. No Ray: the actor is a class like any other."""

import asyncio
from pathlib import Path

import pytest

from penstock.conf.environment import EnvironmentConfig, GatewayConfig
from penstock.conf.rollout import RolloutConfig
from penstock.workers.attempts import actor
from penstock.workers.attempts.actor import Environments, EnvironmentSpec
from penstock.workers.protocols import Sampling
from tests.workers.gateway.chat_models import Saying, tokenizer

CODE = """
class Idle:
    async def run(self, task, ctx):
        pass
"""


@pytest.mark.parametrize(("sampling", "temperature"), [("run", 1.0), ("client", 0.5)])
def test_the_configuration_decides_whose_temperature_counts(
    sampling: str, temperature: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(actor, "load_tokenizer", lambda path: tokenizer())
    (tmp_path / "idle.py").write_text(CODE)
    config = EnvironmentConfig(name=f"{tmp_path}/idle.py:Idle", gateway=GatewayConfig(sampling=sampling))

    async def scenario() -> None:
        environments = Environments(EnvironmentSpec("Environment-0", 0, config, RolloutConfig(), "", 0, 1, ()))
        await environments.start()
        try:
            assert environments._runner is not None
            session = environments._runner._make_session(Sampling())
            session._engines = engines = Saying(["x"])  # type: ignore[assignment]
            await session.sample([{"role": "user", "content": "a"}], is_client=True, temperature=0.5)
            assert engines.samplings[0].temperature == temperature
        finally:
            await environments.close()

    asyncio.run(scenario())

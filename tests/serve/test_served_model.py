"""A served model, by the SDK: what a loop is answered is the same to the bit, whatever dies meanwhile."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from penstock.workers.fresh_model import build_fresh_model
from tests.orchestrator.conftest import SMALL_MODEL
from tests.serve.loop import step
from tests.serve.served import KEY, Served, client, served

pytestmark = pytest.mark.real
NUM_STEPS = 4


ADAPTERS, WHOLE = "serve.max_rank=8", "serve.full=true"


@pytest.fixture(scope="module", params=[ADAPTERS])
def words(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Words of a server that starts within seconds."""
    folder = tmp_path_factory.mktemp("served")
    build_fresh_model(folder / "model", SMALL_MODEL, seed=3)
    return [
        f"model.path={folder}/model", "rollout.engine=hf", "rollout.max_model_len=64", "serve.snapshot_every=3",
        request.param,
    ]  # fmt: skip


def looped(server: Served, disturb: Callable[[int, str], None] = lambda step, place: None, key: str = KEY) -> list[Any]:
    """What a loop of a few steps is answered."""
    with client(server, key) as service:
        training = service.create_lora_training_client(base_model="model", rank=4)
        return [
            step(training, number, lambda place, number=number: disturb(number, place)) for number in range(NUM_STEPS)
        ]


@pytest.fixture(scope="module")
def undisturbed(words: list[str], warm_python: list[str], tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    with served(tmp_path_factory.mktemp("undisturbed"), words, warm_python) as server:
        return looped(server)


@pytest.mark.parametrize(
    "words", [ADAPTERS, pytest.param(WHOLE, marks=pytest.mark.soak("this test of adapters, test_same_loop.py"))],
    indirect=True,
)  # fmt: skip
def test_rank_and_engine_and_server_die_and_no_bit_changes(
    words: list[str], undisturbed: Any, warm_python: list[str], tmp_path: Path
) -> None:
    with served(tmp_path, words, warm_python) as server:

        def disturb(number: int, place: str) -> None:
            if (number, place) == (1, "backward"):  # the gradient is there, its step is not
                server.members("Trainer")[0].kill()
            elif (number, place) == (2, "sample"):
                server.members("Rollout")[0].kill()
            elif (number, place) == (2, "optim"):
                server.kill()
                server.start()

        assert looped(server, disturb) == undisturbed
        assert sum("Trainer-policy-0 is lost" in line for line in server.lines) == 1
        assert sum("Rollout-0 is lost" in line for line in server.lines) == 1


def test_two_clients_get_the_bits_that_each_gets_alone_and_a_third_is_refused(
    words: list[str], undisturbed: Any, warm_python: list[str], tmp_path: Path
) -> None:
    import tinker

    tenants = f"serve.tenants={{default: {{key: {KEY}}}, bob: {{key: tml-bob}}}}"
    with served(tmp_path, [*words, tenants], warm_python) as server, ThreadPoolExecutor() as threads:
        bob = threads.submit(looped, server, key="tml-bob")
        assert looped(server) == undisturbed
        assert len(bob.result()) == NUM_STEPS
        with pytest.raises(tinker.AuthenticationError):
            client(server, "tml-other").get_server_capabilities()

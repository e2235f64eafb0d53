"""Loops through the SDK against a server whose ranks, engines and own process die at random moments: they are answered
what an undisturbed loop is, bit for bit. `make chaos` draws many."""

import random
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from penstock.workers.fresh_model import build_fresh_model
from tests.chaos.plan import SEEDS
from tests.orchestrator.conftest import SMALL_MODEL
from tests.orchestrator.serve.loop import step
from tests.orchestrator.serve.served import Served, client, served

pytestmark = pytest.mark.real

NUM_STEPS, NUM_KILLS = 30, 5
PLACES = ("publish", "sample", "backward", "optim")
VICTIMS = ("Trainer", "Rollout", "server")
LATEST_S = 0.5
"""A kill comes at most so many seconds after the loop has reached its place."""
PRESENT_S = 60.0
"""Deadline for a victim to be there: another may be on its way after the last kill."""


@dataclass(frozen=True)
class Kill:
    who: str
    step: int
    place: str
    after_s: float


def draw_kills(seed: int) -> list[Kill]:
    """The kills of a leg."""
    drawn = random.Random(f"served {seed}")
    return [
        Kill(drawn.choice(VICTIMS), drawn.randrange(NUM_STEPS), drawn.choice(PLACES), drawn.uniform(0.0, LATEST_S))
        for _ in range(NUM_KILLS)
    ]


class Killer:
    """Carries out kills beside a loop, one after the other. Lifecycle: `reached` at each place, `join`."""

    def __init__(self, server: Served, kills: list[Kill]) -> None:
        self._server, self._kills = server, list(kills)
        self._one_at_a_time = threading.Lock()
        self._threads: list[threading.Thread] = []
        self.done: list[Kill] = []

    def reached(self, number: int, place: str) -> None:
        for kill in [one for one in self._kills if (one.step, one.place) == (number, place)]:
            thread = threading.Thread(target=self._carry_out, args=(kill,))
            self._threads.append(thread)
            thread.start()

    def join(self) -> None:
        for thread in self._threads:
            thread.join()

    def _carry_out(self, kill: Kill) -> None:
        time.sleep(kill.after_s)
        with self._one_at_a_time:
            if kill.who == "server":
                self._server.kill()
                self._server.start()
            else:
                self._victim(kill.who).kill()
            self.done.append(kill)

    def _victim(self, who: str) -> Any:
        give_up = time.monotonic() + PRESENT_S
        while not (found := self._server.members(who)):
            assert time.monotonic() < give_up, f"no {who} was there within {PRESENT_S:g} s"
            time.sleep(0.1)
        return found[0]


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("served")
    build_fresh_model(folder / "model", SMALL_MODEL, seed=3)
    return [
        f"model.path={folder}/model", "rollout.engine=hf", "rollout.max_model_len=64", "serve.max_rank=8",
        "serve.snapshot_every=5",
    ]  # fmt: skip


def looped(server: Served, killer: Killer | None = None) -> list[Any]:
    with client(server) as service:
        training = service.create_lora_training_client(base_model="model", rank=4)
        return [
            step(training, number, lambda place, number=number: killer and killer.reached(number, place))  # type: ignore[misc]
            for number in range(NUM_STEPS)
        ]


@pytest.fixture(scope="module")
def undisturbed(words: list[str], tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    with served(tmp_path_factory.mktemp("undisturbed"), words) as server:
        return looped(server)


@pytest.mark.soak("test_served_model.py, where each of them dies once")
@pytest.mark.parametrize("seed", SEEDS)
def test_a_loop_whose_server_ranks_and_engines_die_is_answered_the_same(
    seed: int, words: list[str], undisturbed: list[Any], tmp_path: Path
) -> None:
    kills = draw_kills(seed)
    with served(tmp_path, words) as server:
        killer = Killer(server, kills)
        told = looped(server, killer)
        killer.join()
    assert killer.done
    assert len(killer.done) == len(kills), kills
    assert told == undisturbed, kills

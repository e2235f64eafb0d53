"""Fifty clients of the SDK against a server whose ranks, engines, own process, disk and descriptors fail at random
moments: each acknowledged request counts once. `make verify` has a minute of it, `make soak` ten, `make chaos` many
seeds."""

import random
import resource
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.serve.saved_weights import Checkpoints, WeightsAddress
from penstock.workers.fresh_model import build_fresh_model
from tests.amounts import IS_MANY
from tests.chaos.plan import NET_S, SEEDS
from tests.orchestrator.conftest import SMALL_MODEL
from tests.serve.loop import step
from tests.serve.served import Served, client, served

pytestmark = pytest.mark.real

NUM_CLIENTS, NUM_TENANTS = 50, 5
LOAD_S = 600.0 if IS_MANY else 60.0
"""Faults begin for so long, and until there was one of each."""
LONGEST_PAUSE_S = 8.0
"""Longest time between two faults."""
LONGEST_WANT_S = 4.0
"""Longest time without room on the disk, or without descriptors."""


def kill_server(server: Served) -> None:
    server.kill()
    server.start()


def kill_member(server: Served, who: str) -> None:
    give_up = time.monotonic() + NET_S
    while not (found := server.members(who)):  # another fault has ended it, too
        assert time.monotonic() < give_up, f"no {who} was there within {NET_S:g} s"
        time.sleep(0.1)
    found[0].kill()


def limit(server: Served, what: int, soft: int, seconds: float) -> None:
    """Lower a limit of the server's process for some seconds."""
    process = server.process
    before = process.rlimit(what)
    process.rlimit(what, (soft, before[1]))
    time.sleep(seconds)
    process.rlimit(what, before)


FAULTS: dict[str, Callable[[Served, float], None]] = {
    "server": lambda server, _: kill_server(server),
    "engine": lambda server, _: kill_member(server, "Rollout"),
    "rank": lambda server, _: kill_member(server, "Trainer"),
    "disk": lambda server, seconds: limit(server, resource.RLIMIT_FSIZE, 0, seconds),
    "descriptors": lambda server, seconds: limit(server, resource.RLIMIT_NOFILE, server.process.num_fds(), seconds),
}


@dataclass
class Acknowledged:
    """What the server has told a client of a training run."""

    tenant: int
    steps: list[Any] = field(default_factory=list)
    """All answers of each step, to the bit."""
    saves: list[str] = field(default_factory=list)
    """Path of the state after each step."""

    @property
    def run(self) -> str:
        return WeightsAddress.parse(self.saves[0]).run


def loop(server: Served, tenant: int, is_over: Callable[[int], bool]) -> Acknowledged:
    """Train, sample and save until it is over, one step at least. All clients of a tenant do the same."""
    seen = Acknowledged(tenant)
    with client(server, f"tml-{tenant}") as service:
        training = service.create_lora_training_client("model", rank=4, seed=tenant)
        while not seen.saves or not is_over(len(seen.saves)):
            number = len(seen.saves)
            seen.steps.append(step(training, number))
            seen.saves.append(training.save_state(f"step-{number}").result().path)
    return seen


def disturb(server: Served, seed: int, clients: list[Future[Acknowledged]]) -> None:
    """Do faults in an order that the seed draws, each as often as the others. Raises what a client has failed with."""
    dice, begin, done = random.Random(f"served {seed}"), time.monotonic(), 0
    while done == 0 or time.monotonic() < begin + LOAD_S:
        for name in dice.sample(list(FAULTS), len(FAULTS)):
            time.sleep(dice.uniform(0.0, LONGEST_PAUSE_S))
            for failed in [one for one in clients if one.done()]:
                failed.result()
            print(f"seed {seed}, {time.monotonic() - begin:.1f} s: {name}")
            FAULTS[name](server, dice.uniform(0.5, LONGEST_WANT_S))
            done += 1


def load(server: Served, seed: int) -> list[Acknowledged]:
    """What all clients are acknowledged while faults happen."""
    over = threading.Event()
    with ThreadPoolExecutor(NUM_CLIENTS) as threads:
        numbers = range(NUM_CLIENTS)
        clients = [threads.submit(loop, server, one % NUM_TENANTS, lambda _: over.is_set()) for one in numbers]
        try:
            disturb(server, seed, clients)
        finally:
            over.set()
        return [one.result(NET_S) for one in clients]


def undisturbed(server: Served, num_steps: int) -> list[Acknowledged]:
    """What a client of each tenant is acknowledged while nothing happens."""
    with ThreadPoolExecutor(NUM_TENANTS) as threads:
        tenants = range(NUM_TENANTS)
        return list(threads.map(lambda one: loop(server, one, lambda made: made >= num_steps), tenants))


def assert_found_once(server: Served, seen: Acknowledged, plain: Acknowledged) -> None:
    """Compare what a client was told with what the server has, and with what a client is told to whom nothing
    happens."""
    assert seen.steps == plain.steps[: len(seen.steps)]
    with client(server, f"tml-{seen.tenant}") as service:
        listed = service.create_rest_client().list_checkpoints(seen.run).result().checkpoints
    assert Counter(one.tinker_path for one in listed) == Counter(seen.saves)
    checkpoints = Checkpoints(server.directory / "serve" / "serve" / "checkpoints")
    found, expected = (
        checkpoints.state(WeightsAddress.parse(saves[len(seen.saves) - 1]), with_optimizer=True)
        for saves in (seen.saves, plain.saves)
    )
    assert found.num_steps == expected.num_steps == len(seen.steps)
    assert found.tensors.keys() == expected.tensors.keys()
    for name, value in expected.tensors.items():
        np.testing.assert_array_equal(found.tensors[name], value, err_msg=name)


@pytest.mark.parametrize("seed", SEEDS)
def test_fifty_clients_find_each_acknowledged_request_once_despite_kills(
    seed: int, tmp_path: Path, warm_python: list[str]
) -> None:
    build_fresh_model(tmp_path / "model", SMALL_MODEL, seed=3)
    tenants = ", ".join(f"tenant-{one}: {{key: tml-{one}}}" for one in range(NUM_TENANTS))
    words = [
        f"model.path={tmp_path}/model", "rollout.engine=hf", "rollout.max_model_len=64", "serve.max_rank=8",
        "serve.snapshot_every=5", "serve.max_resident=16", f"serve.tenants={{{tenants}}}", "faults.max_restarts=1000",
        "faults.pause_s=0.1", "faults.window_s=5",
    ]  # fmt: skip
    with served(tmp_path, words, warm_python) as server:
        seen = load(server, seed)
        num_steps = [len(one.saves) for one in seen]
        print(f"seed {seed}: {sum(num_steps)} steps, {min(num_steps)} to {max(num_steps)} of each client")
        plain = undisturbed(server, max(num_steps))
        for one in seen:
            assert_found_once(server, one, plain[one.tenant])

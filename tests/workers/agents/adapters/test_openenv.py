"""Games of a server that runs the package `openenv-core`, in an environment of its own: .venv-openenv."""

import random
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

import pytest

from penstock.conf.errors import ConfigError
from penstock.workers.agents.adapters.openenv import OpenEnv
from penstock.workers.agents.environment import Task
from penstock.workers.agents.trajectory import COMPLETED, FAILED, TRUNCATED
from tests.workers.agents.adapters.adapted import adapter, heard, played

PYTHON = Path(__file__).parents[4] / ".venv-openenv/bin/python"
SERVER = Path(__file__).with_name("openenv_server.py")
START_S = 120.0
Serve = Callable[..., str]


@pytest.fixture(scope="module")
def serve() -> Iterator[Serve]:
    """Starts a server for a number of sessions. Returns its address."""
    assert PYTHON.exists(), "no environment with openenv-core: type `make .venv-openenv/.locked`"
    started: list[subprocess.Popen[bytes]] = []
    addresses: dict[int, str] = {}

    def address_of(sessions: int = 8) -> str:
        if sessions not in addresses:
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = free.getsockname()[1]
            started.append(subprocess.Popen([PYTHON, SERVER, str(port), str(sessions)], stderr=subprocess.DEVNULL))
            deadline = time.monotonic() + START_S
            while True:
                with socket.socket() as tried:
                    if tried.connect_ex(("127.0.0.1", port)) == 0:
                        break
                assert started[-1].poll() is None, "the server has ended"
                assert time.monotonic() < deadline, "the server did not start"
                time.sleep(0.1)
            addresses[sessions] = f"http://127.0.0.1:{port}"
        return addresses[sessions]

    yield address_of
    for process in started:
        process.kill()
        process.wait()


def game(url: str, **options: object) -> OpenEnv:
    made = adapter("openenv", url=url, action="guess", shown="text", **options)
    assert isinstance(made, OpenEnv)
    return made


def task(seed: int) -> tuple[Task, int]:
    """A task, and the number that its game has."""
    return Task(str(seed), seed), random.Random(seed).randint(0, 9)


@pytest.mark.real
def test_turns_have_the_rewards_of_steps_until_the_server_is_done(serve: Serve) -> None:
    one, number = task(3)
    other = (number + 1) % 10
    attempt, _ = played(game(serve(), prompt="Guess {observation}."), one, [str(other), str(number)])
    assert attempt.outcome.kind == COMPLETED
    assert attempt.turn_rewards == {0: 0.0, 1: 1.0}
    assert heard(attempt)[0] == "Guess a number from 0 to 9."
    assert heard(attempt)[1] == ("higher" if other < number else "lower")
    attempt, _ = played(game(serve()), one, [str(other)] * 3)
    assert sum(attempt.turn_rewards.values()) == 0.0
    assert len(attempt.turns) == 3


@pytest.mark.real
def test_an_answer_that_is_no_action_is_told_and_costs(serve: Serve) -> None:
    one, number = task(5)
    attempt, counts = played(game(serve(), penalty=0.25), one, ["what?", "12", str(number)])
    assert attempt.turn_rewards == {0: -0.25, 1: -0.25, 2: 1.0}
    assert heard(attempt)[1:3] == ["That is no action."] * 2
    assert counts["no_action"] == 2


@pytest.mark.real
def test_arguments_reach_reset_and_observations_are_json_unless_said(serve: Serve) -> None:
    environment = adapter("openenv", url=serve().replace("http", "ws"), action="guess", reset={"largest": 0})
    attempt, _ = played(environment, task(1)[0], ["0"])
    assert heard(attempt)[0] == '{"text": "a number from 0 to 0"}'
    assert attempt.reward == 1.0


@pytest.mark.real
def test_ones_own_functions_read_observations_and_make_actions(serve: Serve, tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text(
        "def act(answer):\n    words = answer.split()\n    return {'guess': int(words[-1])} if words else None\n"
        "def describe(observation):\n    return observation['text'].upper()\n"
    )
    one, number = task(4)
    environment = adapter("openenv", url=serve(), act=f"{file}:act", describe=f"{file}:describe")
    attempt, counts = played(environment, one, ["", f"I say {number}"])
    assert heard(attempt)[0] == "A NUMBER FROM 0 TO 9"
    assert (attempt.reward, counts["no_action"]) == (1.0, 1)


@pytest.mark.real
def test_the_servers_own_faults_are_played_again_and_then_fail_the_attempt(serve: Serve) -> None:
    one, number = task(6)
    wrong = next(digit for digit in range(10) if digit not in (7, number))
    attempt, _ = played(game(serve()), one, lambda prompt, sampling: "7" if "lower" in prompt or "higher" in prompt
                        else str(wrong))  # fmt: skip
    assert attempt.outcome.kind == FAILED
    assert attempt.outcome.reason == "infrastructure"
    assert "the server's own fault" in attempt.outcome.detail


def test_a_server_that_is_not_there_is_no_fault_of_the_policy() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    attempt, _ = played(game(url), task(0)[0], ["1"])
    assert attempt.outcome.kind == FAILED
    assert not attempt.turns


@pytest.mark.real
def test_an_attempt_that_is_cut_gives_its_session_back(serve: Serve) -> None:
    """The server takes one session at a time."""
    url = serve(1)
    one, number = task(8)
    wrong = str((number + 1) % 10)
    for _ in range(3):
        attempt, _ = played(game(url), one, [wrong] * 3, max_turns=1)
        assert attempt.outcome.kind == TRUNCATED
    attempt, _ = played(game(url), one, [str(number)])
    assert attempt.reward == 1.0


def test_tasks_are_seeds_and_held_out_ones_are_others() -> None:
    environment = game("ws://127.0.0.1:1")
    first, second = islice(environment.tasks(10), 2)
    assert [(first.id, first.seed), (second.id, second.seed)] == [("0", 10), ("1", 11)]
    assert first.identity != second.identity


@pytest.mark.parametrize(
    ("options", "why"),
    [({"url": "host:80"}, "begins with none of"), ({"url": "ws://h", "timeout_s": 0}, "timeout_s=0")],
)
def test_wrong_options_are_refused_by_name(options: dict[str, object], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        adapter("openenv", **options)

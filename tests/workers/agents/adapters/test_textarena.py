"""Games of the real package: seats, opponents, invalid moves, rewards."""

import asyncio
import itertools
import random
import re
import socket
from pathlib import Path
from typing import Any

import pytest

from penstock.conf.errors import ConfigError
from penstock.workers.agents.adapters.textarena import Game
from penstock.workers.agents.environment import Task
from penstock.workers.agents.trajectory import COMPLETED, REJECTED
from penstock.workers.protocols import Sampling
from tests.workers.agents.adapters.adapted import adapter, heard, played
from tests.workers.agents.played import ScriptedEngines, make_runner

GAMES = ("TicTacToe-v0", "KuhnPoker-v0", "ConnectFour-v0", "Nim-v0")


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a game wants the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)


def task(seat: int, opponent: str, seed: int = 1) -> Task:
    return Task("0", seed, {"seat": seat, "opponent": opponent})


@pytest.fixture(scope="module")
def row(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Somebody who fills the first row of tic-tac-toe that is free."""
    path = tmp_path_factory.mktemp("player") / "player.py"
    path.write_text(
        "import re\n"
        "async def move(read):\n"
        "    return min(re.findall(r'\\[\\d\\]', read.rpartition('Available Moves')[2]))\n"
    )
    return f"{path}:move"


def test_each_seat_is_told_what_is_new_and_gets_its_reward(row: str) -> None:
    environment = adapter("textarena", id="TicTacToe-v0", opponents=[row])
    attempt, counts = played(environment, task(0, row), ["[6]", "7", "I take [8]."])
    assert (attempt.outcome.kind, attempt.reward, counts["turns"]) == (COMPLETED, 1.0, 3)
    first, second, _ = heard(attempt)
    assert first.startswith("You are Player 0 in Tic Tac Toe.")
    assert "placed their symbol (X) in cell 0" in second
    assert "You are Player" not in second
    assert len(attempt.turns) == 3
    lost, _ = played(environment, task(1, row), ["[3]", "[7]"])
    assert (lost.reward, lost.turns[1].parent) == (0.0, 0)


def test_an_invalid_move_is_told_once_and_loses_then() -> None:
    environment = adapter("textarena", id="TicTacToe-v0", opponents=["random"], raw_rewards=True)
    attempt, counts = played(environment, task(0, "random"), ["none", "9"])
    assert (attempt.reward, counts["lost_by_invalid_move"]) == (-1.0, 1)
    assert "attempted an invalid move" in heard(attempt)[1]


@pytest.mark.parametrize("opponent", ["self", "function"])
def test_a_game_that_the_opponent_ends_first_is_rejected_and_no_failure(opponent: str, tmp_path: Path) -> None:
    if opponent == "function":
        (tmp_path / "clumsy.py").write_text("def move(read):\n    return '[99]'\n")
        opponent = f"{tmp_path}/clumsy.py:move"
    environment = adapter("textarena", id="TicTacToe-v0", opponents=[opponent])
    attempt, counts = played(environment, task(1, opponent), ["99", "99"])
    assert (attempt.outcome.kind, attempt.outcome.reason) == (REJECTED, "rejected_no_move")
    assert (counts["attempts_rejected"], counts["attempts_failed"]) == (1, 0)


def test_the_policy_against_itself_is_trained_on_one_seat() -> None:
    environment = adapter("textarena", id="Nim-v0", kwargs={"piles": [1, 1, 1]})
    attempt, counts = played(environment, task(1, "self"), ["[0 1]", "[1 1]", "[2 1]"])
    assert (attempt.reward, counts["turns"], len(attempt.turns)) == (0.0, 3, 1)
    assert "Player 1" in heard(attempt)[0]


@pytest.mark.parametrize("game", GAMES)
def test_games_between_random_players_end_as_their_seeds_have_it(game: str) -> None:
    environment = adapter("textarena", id=game, opponents=["random"])

    def legal(prompt: str, sampling: Sampling) -> str:
        draws = random.Random(f"{prompt}")
        taken = {"ConnectFour-v0": "012", "Nim-v0": ["0 1", "1 1", "2 1"]}.get(game)
        listed = re.findall(r"\[[^\[\]]+\]", prompt.rpartition("vailable")[2])
        return str(draws.choice(taken or listed))

    async def both(seeds: list[int]) -> list[Any]:
        runner = make_runner(environment, ScriptedEngines(legal), max_tokens=9000, max_model_len=9000, max_turns=30)
        tasks = [task(seed % 2, "random", seed) for seed in seeds]
        return await asyncio.gather(*(runner.attempt(one, Sampling(max_tokens=20, seed=1)) for one in tasks))

    apart = [asyncio.run(both([seed]))[0] for seed in range(4)]
    together = asyncio.run(both([0, 1, 2, 3]))
    assert [attempt.outcome.kind for attempt in apart] == [COMPLETED] * 4
    assert [heard(attempt) for attempt in apart] == [heard(attempt) for attempt in together]
    assert [attempt.reward for attempt in apart] == [attempt.reward for attempt in together]
    assert {attempt.reward for attempt in apart} <= {0.0, 0.5, 1.0}


@pytest.mark.parametrize("id", GAMES)
def test_legal_moves_are_never_refused(id: str) -> None:
    draws = random.Random(5)
    for seed in range(10):
        game, is_over, read = Game(id, {}, seed), False, ["", ""]
        while not is_over:
            player, news = game.unread()
            read[player] = "\n".join(news)
            is_over = game.play(draws.choice(game.legal_moves(read[player])))
        assert not any(game.made_invalid_move(player) for player in range(2))


def test_a_game_leaves_the_random_numbers_of_others_alone() -> None:
    random.seed(3)
    expected = random.random()
    random.seed(3)
    Game("KuhnPoker-v0", {}, 1).play("[bet]")
    assert random.random() == expected


def test_tasks_take_opponents_and_seats_in_turn() -> None:
    tasks = itertools.islice(adapter("textarena", id="Nim-v0", opponents=["self", "random"]).tasks(9), 5)
    found = [(one.seed, one.data["opponent"], one.data["seat"]) for one in tasks]
    assert found == [(9, "self", 0), (10, "random", 0), (11, "self", 1), (12, "random", 1), (13, "self", 0)]


def test_what_cannot_be_is_refused_with_what_can(row: str) -> None:
    with pytest.raises(ConfigError, match=r"options\.id=TicTacTo-v0.*did you mean 'TicTacToe-v0'"):
        adapter("textarena", id="TicTacTo-v0")
    with pytest.raises(ConfigError, match="no 'radom'; did you mean 'random'"):
        adapter("textarena", id="Nim-v0", opponents=["radom"])
    with pytest.raises(ConfigError, match="no game of two"):
        adapter("textarena", id="Sudoku-v0")
    with pytest.raises(ConfigError, match="does not say which moves there are"):
        adapter("textarena", id="SimpleNegotiation-v0", opponents=["random"])
    with pytest.raises(ConfigError, match="opponents=\\[\\]"):
        adapter("textarena", id="Nim-v0", opponents=[])
    with pytest.raises(ConfigError, match="did you mean 'move'"):
        adapter("textarena", id="Nim-v0", opponents=[f"{Path(row.rpartition(':')[0])}:moves"])

"""Two-player games of `textarena`: the policy plays one seat, which is trained; an opponent the other.

messages of the game to the player since its last move ─▶ sample, or the opponent ─▶ step ─▶ … ─▶ rewards
"""

import importlib
import inspect
import itertools
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from penstock.conf.errors import ConfigError, suggest
from penstock.workers.agents.environment import Context, Task, environment
from penstock.workers.agents.gateway.conversation import Message
from penstock.workers.user_code import find_function

SEATS = 2


@environment("textarena")
class TextArena:
    """Games whose tasks take the opponents in turn, and for each opponent the seats. The game decides on invalid moves:
    most games say what was wrong once, then the player has lost.

    environment:
      name: textarena
      options: {id: TicTacToe-v0, opponents: [self, random, my_player.py:move]}
    data: {source: environment}
    """

    def __init__(
        self,
        id: str,
        kwargs: Mapping[str, Any] | None = None,
        opponents: Sequence[str] = ("self",),
        raw_rewards: bool = False,
    ) -> None:
        """`id`: TicTacToe-v0, KuhnPoker-v0, ConnectFour-v0, Nim-v0, …; `kwargs`: for the game. `opponents`: self (the
        policy, not trained), random (any legal move), or `file.py:function` from what the player has read to its move.
        `raw_rewards`: the game's, -1 to 1, instead of 0 for a loss, 0.5 for a draw, 1 for a win. Raises
        `ConfigError`."""
        importlib.import_module("textarena")
        self._id, self._kwargs, self._raw, self._opponents = id, dict(kwargs or {}), raw_rewards, tuple(opponents)
        if not self._opponents:
            raise ConfigError("environment.options.opponents=[]: name one, such as self.")
        game = Game(id, self._kwargs, seed=0)
        self._moves: dict[str, Callable[[str], Any]] = {}
        for name in {*self._opponents} - {"self", "random"}:
            if ":" not in name:
                raise ConfigError(
                    f"environment.options.opponents: there is no {name!r}{suggest(name, ('self', 'random'))}"
                )
            self._moves[name] = find_function(name, "environment.options.opponents")
        if "random" in self._opponents and not game.legal_moves("\n".join(game.unread()[1])):
            raise ConfigError(
                f"environment.options.opponents: {id} does not say which moves there are, so that nobody can play at "
                "random. Take self, or file.py:function."
            )

    def tasks(self, seed: int) -> Iterator[Task]:
        for index in itertools.count():
            opponent = self._opponents[index % len(self._opponents)]
            seat = index // len(self._opponents) % SEATS
            problem = [self._id, self._kwargs, seed + index]
            yield Task(str(index), seed + index, {"opponent": opponent, "seat": seat}, problem=problem)

    async def run(self, task: Task, ctx: Context) -> None:
        game, draws = Game(self._id, self._kwargs, task.seed), random.Random(f"{task.seed}/opponent")
        seat, opponent = task.data["seat"], task.data["opponent"]
        conversations: list[list[Message]] = [[] for _ in range(SEATS)]
        is_over = False
        while not is_over:
            player, messages = game.unread()
            read = "\n".join(messages)
            if player == seat or opponent == "self":
                conversations[player].append({"role": "user", "content": read})
                turn = await ctx.sample(conversations[player], train=player == seat)
                conversations[player].append(turn.message)
                move = turn.answer
            elif opponent == "random":
                move = draws.choice(game.legal_moves(read) or [""])
            else:
                move = self._moves[opponent](read)
                move = str(await move if inspect.isawaitable(move) else move)
            is_over = game.play(move)
        if not ctx.turns:
            ctx.reject("no_move", "the opponent ended the game before the policy was to move")
        if game.made_invalid_move(seat):
            ctx.count("lost_by_invalid_move")
        reward = game.rewards()[seat]
        ctx.reward(reward if self._raw else (reward + 1) / 2)


class Game:
    """A game. The package draws from the one generator of `random`: each game puts its own state there while it plays,
    so that each of several concurrent games goes as its seed has it."""

    def __init__(self, id: str, kwargs: Mapping[str, Any], seed: int) -> None:
        """Start the game. Raises `ConfigError`."""
        textarena = importlib.import_module("textarena")
        known = textarena.envs.registration.ENV_REGISTRY
        if id not in known:
            raise ConfigError(f"environment.options.id={id}: textarena has no such game{suggest(id, known)}")
        self._draws = random.Random(seed).getstate()
        try:
            made = self._drawing(textarena.make, id, **kwargs)
            while isinstance(made, textarena.Wrapper):
                made = made.env  # they would repeat the whole game each turn
            self._drawing(made.reset, num_players=SEATS, seed=seed)
        except AssertionError as error:
            raise ConfigError(f"environment.options.id={id}: no game of two: {error}") from error
        self._game = made
        self._own = textarena.ObservationType.PLAYER_ACTION

    def unread(self) -> tuple[int, list[str]]:
        """The player to move, and the messages that this player has not read yet, without its own moves."""
        player, observation = self._game.get_observation()
        return player, [text for sender, text, kind in observation if not (kind == self._own and sender == player)]

    def play(self, move: str) -> bool:
        """Make a move; return whether the game is over. A move may come without its brackets."""
        return bool(self._drawing(self._game.step, move if "[" in move or "]" in move else f"[{move.strip()}]")[0])

    def rewards(self) -> Mapping[int, float]:
        return self._game.close()[0]

    def made_invalid_move(self, player: int) -> bool:
        """Return whether a player made an invalid move, and has lost by it."""
        return bool(self._game.close()[1][player]["invalid_move"])

    def legal_moves(self, read: str) -> list[str]:
        """The legal moves, as far as the board or the text that was read shows them."""
        board, piles = (self._game.state.game_state.get(name) for name in ("board", "piles"))
        if piles is not None:
            return [f"[{pile} {count}]" for pile, size in enumerate(piles) for count in range(1, size + 1)]
        if hasattr(self._game, "num_cols") and board is not None:
            return [f"[col {column}]" for column in range(self._game.num_cols) if board[0][column] == "."]
        listed = re.findall(r"(?:available|legal|valid) (?:moves|actions)[^\[\n]*(\[.*)", read, re.IGNORECASE)
        return re.findall(r"\[[^\[\]]+\]", listed[-1]) if listed else []

    def _drawing(self, function: Callable[..., Any], *args: Any, **keywords: Any) -> Any:
        before = random.getstate()
        random.setstate(self._draws)
        try:
            return function(*args, **keywords)
        finally:
            self._draws = random.getstate()
            random.setstate(before)

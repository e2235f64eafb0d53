"""A game served by the package `openenv-core`, in whose own environment this runs: guess a number from 0 to 9.

python openenv_server.py PORT [MOST_SESSIONS]
"""

import random
import sys
from typing import Any

import uvicorn
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State
from pydantic import Field

TURNS = 3


class Guess(Action):
    guess: int = Field(ge=0, le=9)


class Told(Observation):
    text: str = ""


class Game(Environment[Guess, Told, State]):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed: int | None = None, episode_id: str | None = None, largest: int = 9, **_: Any) -> Told:
        self._number, self._turn = random.Random(seed).randint(0, largest), 0
        return Told(text=f"a number from 0 to {largest}")

    def step(self, action: Guess, timeout_s: float | None = None, **_: Any) -> Told:
        if action.guess == 7 and self._turn == 1:
            raise RuntimeError("the server's own fault")
        self._turn += 1
        is_right = action.guess == self._number
        text = "right" if is_right else "higher" if action.guess < self._number else "lower"
        return Told(text=text, done=is_right or self._turn == TURNS, reward=1.0 if is_right else 0.0)

    @property
    def state(self) -> State:
        return State(step_count=self._turn)


if __name__ == "__main__":
    most = int(sys.argv[2]) if len(sys.argv) > 2 else 8
    app = create_fastapi_app(Game, Guess, Told, max_concurrent_envs=most)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")

"""Step environments of `gymnasium` and `minigrid`: an observation is a message, an answer is an action.

reset ─▶ observation as text ─▶ sample ─▶ the last action that the answer names ─▶ step ─▶ … ─▶ terminated

The text of an observation is what terminals show, what a MiniGrid agent sees, or the numbers.
"""

import asyncio
import importlib
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.conf.errors import ConfigError, suggest
from penstock.workers.agents.environment import Context, Task, environment
from penstock.workers.agents.gateway.conversation import Message
from penstock.workers.user_code import find_function


@dataclass(frozen=True)
class GameFacts:
    """Facts that the environment itself does not say."""

    actions: Sequence[str]
    legend: str = ""


KNOWN = {
    "FrozenLake": GameFacts(
        ("left", "down", "right", "up"), "Go from S to G, not into a hole H; [ ] is where you are."
    ),
    "CliffWalking": GameFacts(("up", "right", "down", "left"), "Go to T, not off the cliff C; x is where you are."),
    "Taxi": GameFacts(
        ("south", "north", "east", "west", "pickup", "dropoff"),
        "Fetch the passenger, whose place is blue, and bring him to the magenta one; [ ] is the taxi.",
    ),
    "Blackjack": GameFacts(("stick", "hit"), "Your sum, the dealer's card, and whether you have a usable ace:"),
}
OPTIONS = "environment.options"
PROMPT = "{legend}\n{observation}\nActions: {actions}. Answer with one of them."
COLOURS = ("grey", "red", "green", "yellow", "blue", "magenta", "cyan", "white")
"""Colours of terminals, from code 30; as backgrounds from 40."""
_COLOURED = re.compile(r"((?:\x1b\[[\d;]*m)+)([^\x1b]*)((?:\x1b\[0m)+)")
DIRECTIONS = ("right", "down", "left", "up")
OBJECTS = {2: "wall", 4: "door", 5: "key", 6: "ball", 7: "box", 8: "goal", 9: "lava"}
"""Names of MiniGrid's object codes; empty floor and cells out of sight are left out."""
OBJECT_COLOURS = ("red", "green", "blue", "purple", "yellow", "grey")
DOOR_STATES = ("open", "closed", "locked")


@dataclass(frozen=True)
class GymnasiumOptions:
    """The options of a step environment."""

    id: str
    """Id for `gymnasium.make`; `module:id` for a package that registers its own."""
    kwargs: Mapping[str, Any] | None = None
    """Further arguments of `gymnasium.make`."""
    actions: Sequence[str] | None = None
    """Names of the actions from the first, where others are better."""
    prompt: str = PROMPT
    """First message; {observation}, {actions} and {legend} are replaced."""
    render: bool | None = None
    """True to show what the terminal would; null: only where the observation is a number."""
    describe: str | None = None
    """`file.py:function` from an observation to a text."""
    act: str | None = None
    """`file.py:function` from an answer to an action, None for none."""
    penalty: float = 0.0
    """Cost of an answer that is no action, for which nothing else happens."""
    threads: bool = False
    """True where steps are slow: they run in threads then."""


@environment("gymnasium")
class Gymnasium:
    """Step environments, of which a task is a seed of `reset`. Each turn has the reward of its step.

    environment:
      name: gymnasium
      options: {id: MiniGrid-Empty-5x5-v0, penalty: 0.01}
    data: {source: environment}
    """

    def __init__(self, **options: Any) -> None:
        """Make the environment once, to know its actions. `options`: of `GymnasiumOptions`. Raises `ConfigError`."""
        self._options = given = GymnasiumOptions(**options)
        self._gymnasium = importlib.import_module("gymnasium")
        if given.id.startswith(("MiniGrid-", "BabyAI-")):
            importlib.import_module("minigrid")
        self._kwargs = dict(given.kwargs or {})
        self._game = [given.id, dict(self._kwargs)]
        made = self._made()
        space, known = made.action_space, KNOWN.get(given.id.rpartition(":")[2].partition("-")[0], GameFacts(()))
        is_number = isinstance(made.observation_space, self._gymnasium.spaces.Discrete)
        self._renders, self._legend = given.render, known.legend
        if self._renders is None:
            self._renders = is_number and "ansi" in made.metadata.get("render_modes", ()) and given.describe is None
        if self._renders:
            self._kwargs["render_mode"] = "ansi"
        self._describe = find_function(given.describe, f"{OPTIONS}.describe") if given.describe else as_text
        own = [action.name for action in getattr(made.unwrapped, "actions", ())]
        self._names = [str(name) for name in given.actions or known.actions or own]
        made.close()
        if given.act is not None:
            self._act: Callable[[str], Any] = find_function(given.act, f"{OPTIONS}.act")
        elif isinstance(space, self._gymnasium.spaces.Discrete):
            self._names = self._names or [str(space.start + index) for index in range(int(space.n))]
            if len(self._names) != space.n:
                raise ConfigError(f"{OPTIONS}.actions: {len(self._names)} names, and {given.id} has {space.n} actions.")
            self._act = NamedActions(self._names, int(space.start))
        else:
            raise ConfigError(
                f"{OPTIONS}.id={given.id}: its actions are {space}, of which none can be named. Say by "
                f"{OPTIONS}.act=file.py:function which one an answer is."
            )

    def tasks(self, seed: int) -> Iterator[Task]:
        return (Task(str(index), seed + index, problem=[*self._game, seed + index]) for index in itertools.count())

    async def run(self, task: Task, ctx: Context) -> None:
        made = await self._call(self._made)
        try:
            observation, _ = await self._call(made.reset, seed=task.seed)
            state = self._text(made, observation)
            messages: list[Message] = [{"role": "user", "content": self._opening(state)}]
            is_over = False
            while not is_over:
                turn = await ctx.sample(messages, state=state)
                action = self._act(turn.answer)
                if action is None or not made.action_space.contains(action):
                    ctx.count("no_action")
                    ctx.reward(-self._options.penalty, turn=turn)
                    text = f"That is no action. Actions: {', '.join(self._names)}."
                else:
                    observation, reward, terminated, truncated, _ = await self._call(made.step, action)
                    ctx.reward(float(reward), turn=turn)
                    is_over, text = terminated or truncated, self._text(made, observation)
                    state = text
                messages += [turn.message, {"role": "user", "content": text}]
        finally:
            await self._call(made.close)

    def _opening(self, observation: str) -> str:
        said = {"legend": self._legend, "actions": ", ".join(self._names), "observation": observation}
        return re.sub(r"\{(legend|actions|observation)\}", lambda name: said[name[1]], self._options.prompt).strip()

    def _text(self, made: Any, observation: Any) -> str:
        return without_colours(made.render()) if self._renders else str(self._describe(observation))

    def _made(self) -> Any:
        try:
            return self._gymnasium.make(self._options.id, **self._kwargs)
        except (self._gymnasium.error.Error, ImportError) as error:
            near = suggest(self._options.id, self._gymnasium.registry)
            raise ConfigError(f"{OPTIONS}.id={self._options.id}: {error}{near}") from error

    async def _call(self, function: Callable[..., Any], *args: Any, **keywords: Any) -> Any:
        if self._options.threads:
            return await asyncio.to_thread(function, *args, **keywords)
        return function(*args, **keywords)


class NamedActions:
    """Parser for the action that an answer names last, by its name or its number; None if it names none."""

    def __init__(self, names: Sequence[str], start: int = 0) -> None:
        self._numbers = {name.lower(): start + index for index, name in enumerate(names)}
        words = "|".join(re.escape(name) for name in sorted(self._numbers, key=len, reverse=True))
        self._said = re.compile(rf"(?<![\w.])({words}|-?\d+(?:\.\d+)?)(?!\w)", re.IGNORECASE)
        self._range = range(start, start + len(names))

    def __call__(self, answer: str) -> int | None:
        found = self._said.findall(answer)
        if not found:
            return None
        word = found[-1].lower()
        number = self._numbers.get(word, int(word) if word.isdecimal() else None)
        return number if number in self._range else None


def as_text(observation: Any) -> str:
    """The text of an observation of any space: MiniGrid's in words, numbers one after the other, the parts of a
    dictionary by name."""
    if isinstance(observation, Mapping) and {"image", "direction", "mission"} <= observation.keys():
        return view_text(observation)
    if isinstance(observation, Mapping):
        return "\n".join(f"{name}: {as_text(value)}" for name, value in observation.items())
    if isinstance(observation, str):
        return observation
    if isinstance(observation, tuple | list):
        return " ".join(map(as_text, observation))
    if hasattr(observation, "tolist"):
        return as_text(observation.tolist())
    return f"{observation:.4g}" if isinstance(observation, float) else str(observation)


def without_colours(text: str) -> str:
    """A terminal's text without colours: a background becomes brackets, another colour its name.

    >>> without_colours("\\x1b[41mS\\x1b[0mF\\x1b[35mY\\x1b[0m")
    '[S]FY(magenta)'
    """

    def plain(match: re.Match[str]) -> str:
        codes, shown, _ = match.groups()
        for code in map(int, re.findall(r"\d+", codes)):
            if 30 <= code <= 37:
                shown = f"{shown}({COLOURS[code - 30]})"
        return f"[{shown}]" if re.search(r"4[0-7]", codes) else shown

    return _COLOURED.sub(plain, text).strip("\n")


def view_text(observation: Mapping[str, Any]) -> str:
    """The view of the agent: the mission, where it looks, what it carries and what it sees, nearest first.

    mission: go to the green goal
    looking right
    wall ahead 4; green goal ahead 2, right 1
    """
    image = observation["image"]
    width, height = len(image), len(image[0])
    carried = _thing(image[width // 2][height - 1])
    cells = [(height - 1 - row, column - width // 2, image[column][row])
             for column in range(width) for row in range(height)]  # fmt: skip
    places = [(ahead, right, thing) for ahead, right, cell in cells if (thing := _thing(cell)) and (ahead or right)]
    things: list[str] = []
    walls = set()
    for ahead, right, thing in sorted(places, key=lambda place: (place[0] + abs(place[1]), place)):
        if thing == "wall":  # of walls the next one straight ahead, and on each side
            way = (ahead > 0, (right > 0) - (right < 0))
            if (ahead and right) or way in walls:
                continue
            walls.add(way)
        things.append(_place(thing, ahead, right))
    lines = [
        f"mission: {observation['mission']}",
        f"looking {DIRECTIONS[int(observation['direction'])]}" + (f", carrying a {carried}" if carried else ""),
        "; ".join(things) or "nothing in sight",
    ]
    return "\n".join(lines)


def _thing(cell: Any) -> str:
    kind, colour, state = map(int, cell)
    name = OBJECTS.get(kind, "")
    if name in ("", "wall", "lava"):
        return name
    return (
        f"{DOOR_STATES[state]} {OBJECT_COLOURS[colour]} door" if name == "door" else f"{OBJECT_COLOURS[colour]} {name}"
    )


def _place(thing: str, ahead: int, right: int) -> str:
    sideways = f"{'right' if right > 0 else 'left'} {abs(right)}" if right else ""
    return f"{thing} " + ", ".join(part for part in (f"ahead {ahead}" if ahead else "", sideways) if part)

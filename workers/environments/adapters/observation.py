"""The text of an observation for a model: what terminals show, what a MiniGrid agent sees, or the numbers. Pure."""

import re
from collections.abc import Mapping
from typing import Any

COLOURS = ("grey", "red", "green", "yellow", "blue", "magenta", "cyan", "white")
"""Colours of terminals, from code 30; as backgrounds from 40."""
_PAINTED = re.compile(r"((?:\x1b\[[\d;]*m)+)([^\x1b]*)((?:\x1b\[0m)+)")
DIRECTIONS = ("right", "down", "left", "up")
OBJECTS = {2: "wall", 4: "door", 5: "key", 6: "ball", 7: "box", 8: "goal", 9: "lava"}
"""Names of MiniGrid's object codes; empty floor and cells out of sight are left out."""
OBJECT_COLOURS = ("red", "green", "blue", "purple", "yellow", "grey")
DOOR_STATES = ("open", "closed", "locked")


def as_text(observation: Any) -> str:
    """The text of an observation of any space: MiniGrid's in words, numbers one after the other, the parts of a
    dictionary by name."""
    if isinstance(observation, Mapping) and {"image", "direction", "mission"} <= observation.keys():
        return seen(observation)
    if isinstance(observation, Mapping):
        return "\n".join(f"{name}: {as_text(value)}" for name, value in observation.items())
    if isinstance(observation, str):
        return observation
    if isinstance(observation, tuple | list):
        return " ".join(map(as_text, observation))
    if hasattr(observation, "tolist"):
        return as_text(observation.tolist())
    return f"{observation:.4g}" if isinstance(observation, float) else str(observation)


def painted(text: str) -> str:
    """A terminal's text without colours: a background becomes brackets, another colour its name.

    >>> painted("\\x1b[41mS\\x1b[0mF\\x1b[35mY\\x1b[0m")
    '[S]FY(magenta)'
    """

    def plain(match: re.Match[str]) -> str:
        codes, shown, _ = match.groups()
        for code in map(int, re.findall(r"\d+", codes)):
            if 30 <= code <= 37:
                shown = f"{shown}({COLOURS[code - 30]})"
        return f"[{shown}]" if re.search(r"4[0-7]", codes) else shown

    return _PAINTED.sub(plain, text).strip("\n")


def seen(observation: Mapping[str, Any]) -> str:
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

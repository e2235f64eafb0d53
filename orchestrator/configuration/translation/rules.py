"""Translation of another framework's configuration, key by key. Pure.

    their keys, flat ─▶ Rule: one or a few of their keys ─▶ ours, or why there is none
                     ─▶ Translation: a recipe, what each key has become, what has no counterpart, what is to be decided

A key that no rule knows is told, never passed over.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.orchestrator.configuration.translation.shell import is_unresolved

UNKNOWN = "not known to this translation: `penstock keys` may know a key for it"
Values = Mapping[str, Any]
"""Keys with dots, and their values."""


class NotTranslated(Exception):
    """A value of a known key that has no counterpart. Its text says what to do."""


@dataclass(frozen=True)
class Rule:
    """Translation of one of their keys, or of several that mean something together."""

    theirs: tuple[str, ...]
    make: Callable[..., Values]
    """Called with the values of `theirs`, None for one that is not set, if one of them is set. Returns our keys. Raises
    `NotTranslated`."""
    ours: str = ""
    """Our keys, for people."""
    told: str = ""
    """What differs, for people."""


def same(theirs: str, ours: str, told: str = "") -> Rule:
    """Make the rule of a key that means the same under another name."""
    return Rule((theirs,), lambda value: {ours: value}, f"`{ours}`", told)


def rule(theirs: str, ours: str, told: str = "") -> Callable[[Callable[..., Values]], Rule]:
    """Make the rule of keys, separated by spaces, whose values a function translates."""
    return lambda make: Rule(tuple(theirs.split()), make, ours, told)


@dataclass(frozen=True)
class Framework:
    """What is known of another framework's configuration."""

    name: str
    marks: tuple[str, ...]
    """Beginnings of keys that no other framework has."""
    rules: tuple[Rule, ...]
    without: Mapping[str, str]
    """Beginnings of keys without a counterpart, and why there is none."""
    always: Values = field(default_factory=dict)
    """Our keys where theirs have another default."""
    owned: tuple[str, ...] = ()
    """Beginnings of keys that Penstock has none of, so that a key with one is meant for this framework."""
    asked: Values = field(default_factory=dict)
    """Keys without which no recipe is whole, and what to do where one is not there."""

    def is_of(self, values: Values) -> bool:
        return any(key.startswith(self.marks) for key in values)

    def reason(self, key: str) -> str:
        """Why a key that no rule knows has no counterpart, or what there is instead; empty where nothing is known."""
        beginnings = [beginning for beginning in self.without if key.startswith(beginning)]
        return self.without[max(beginnings, key=len)] if beginnings else ""


@dataclass
class Translation:
    """A translated configuration."""

    recipe: dict[str, Any] = field(default_factory=dict)
    """Our keys, nested as in a recipe.yaml."""
    became: list[tuple[str, str]] = field(default_factory=list)
    """Their keys, and what each has become."""
    lost: list[tuple[str, str]] = field(default_factory=list)
    """Their keys without a counterpart, and why, or what to do."""
    assumed: Values = field(default_factory=dict)
    """Our keys that none of theirs has given a value."""


def translate(framework: Framework, values: Values) -> Translation:
    """Translate a flat configuration."""
    found = Translation(lost=[(key, why) for key, why in framework.asked.items() if key not in values])
    unresolved = {key for key, value in values.items() if is_unresolved(str(value))}
    found.lost += [(key, f"its value {values[key]!r} is known only when the script runs") for key in sorted(unresolved)]
    values = {key: value for key, value in values.items() if key not in unresolved}
    ours: dict[str, Any] = {}
    known: set[str] = set()
    for one in framework.rules:
        given = [key for key in one.theirs if key in values]
        known |= set(given)
        if not given:
            continue
        try:
            made = one.make(*(values.get(key) for key in one.theirs))
        except NotTranslated as error:
            found.lost += [(key, str(error)) for key in given]
            continue
        except (TypeError, ValueError, AttributeError, ArithmeticError, LookupError):  # such as a shell's variable
            found.lost += [(key, f"its value {values[key]!r} is none that it can have") for key in given]
            continue
        ours |= made
        what = ", ".join(f"{key}={_shown(value)}" for key, value in made.items()) or "nothing: it is so anyway"
        found.became += [(key, what) for key in given]
    for key in values:
        if key not in known:
            found.lost.append((key, framework.reason(key) or UNKNOWN))
    set_ones = ours.keys() | ({"reward.function"} if "rewards" in ours else set())
    found.assumed = {key: value for key, value in framework.always.items() if key not in set_ones}
    for key, value in {**found.assumed, **ours}.items():
        _put(found.recipe, key.split("."), value)
    return found


def on_shared_gpus(total: int, size: int, *, has_reference: bool) -> Values:
    """Our keys of a trainer, its engines of `size` GPUs each and its reference, which share so many GPUs. An engine of
    several GPUs has those of whole ranks, so that the reference then has the other half. Raises `NotTranslated`."""
    if size > 1 and has_reference:
        if total // 2 % size or total < 2:
            raise NotTranslated(f"{total} GPUs do not part into engines of {size} and as many for the reference")
        total, engine, rank = total // 2, 0.1, 0.9
    else:
        engine, rank = (0.5, 0.25) if has_reference else (0.5, 0.5)
    if total % size:
        raise NotTranslated(f"{total} GPUs do not part into engines of {size}")
    return {
        "placement": "colocated", "trainer.num_ranks": total, "trainer.num_gpus_per_rank": rank,
        "rollout.num_workers": total // size, "rollout.tensor_parallel_size": size,
        "rollout.num_gpus_per_worker": engine,
    }  # fmt: skip


def table(framework: Framework) -> str:
    """What each key becomes, as tables in Markdown."""
    lines = [f"| {framework.name} | here | |", "|---|---|---|"]
    for one in framework.rules:
        lines.append(f"| {', '.join(f'`{key}`' for key in one.theirs)} | {one.ours} | {one.told} |")
    lines += ["", f"| {framework.name}, without a counterpart | why, or what there is instead |", "|---|---|"]
    lines += [f"| `{key}{'…' if key[-1] in '._' else ''}` | {why} |" for key, why in framework.without.items()]
    return "\n".join(lines) + "\n"


def _put(tree: dict[str, Any], path: Sequence[str], value: Any) -> None:
    for name in path[:-1]:
        tree = tree.setdefault(name, {})
    tree[path[-1]] = value


def _shown(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return f"{value:g}" if isinstance(value, float) else str(value)

"""What other frameworks call the keys of a run: the answer to a key of theirs that is given to Penstock."""

from collections.abc import Iterator

from penstock.orchestrator.configuration.translation.rules import Framework
from penstock.orchestrator.configuration.translation.trl import TRL
from penstock.orchestrator.configuration.translation.verl import VERL

FRAMEWORKS = (VERL, TRL)


def counterpart(key: str) -> str:
    """What a key of another framework is here, in a sentence; empty for a key that none has."""
    for framework in FRAMEWORKS:
        for theirs, said in _told(framework):
            if key == theirs:
                return f"{framework.name}'s {key} is {said} here."
        if key.startswith(framework.owned):
            why = f": {reason}" if (reason := framework.reason(key)) else ""
            return f"It is a key of {framework.name}'s{why}. `penstock translate FILE` makes a recipe of its script."
    return ""


def counterparts(words: list[str]) -> Iterator[tuple[str, str, str]]:
    """Framework, key and what it is here, of all keys whose names have all these words."""
    for framework in FRAMEWORKS:
        for theirs, said in _told(framework):
            if all(word in theirs.lower() for word in words):
                yield framework.name, theirs, said


def _told(framework: Framework) -> Iterator[tuple[str, str]]:
    for rule in framework.rules:
        for theirs in rule.theirs:
            yield theirs, rule.ours.replace("`", "")

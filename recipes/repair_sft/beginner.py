"""Demonstrations of a beginner who finds the function of which the test speaks, and then changes one of its lines at
random, whatever the name says."""

import random
from collections.abc import Iterator
from typing import Any

from penstock.recipes.repair.repair import PASSED, REPOSITORIES, RUN, TEST, Repository, mistakes

COMMANDS, SHARE_RIGHT_LINES = 3, 0.5


def commands(seed: int) -> Iterator[dict[str, Any]]:
    """Iterate over rows, one a command: the conversation so far, and the command."""
    draws = random.Random(f"beginner {seed}")
    while True:
        yield from attempt(Repository(draws.choice(list(REPOSITORIES)), draws.randrange(2**31)), draws)


def attempt(repository: Repository, draws: random.Random) -> Iterator[dict[str, Any]]:
    """Iterate over the rows of one attempt."""
    sign = repository.wrong
    messages = [{"role": "user", "content": repository.message(sign)}]
    for number in range(COMMANDS):
        if number == 0:
            command, printed = look(repository), looked(repository)
        else:
            is_right_line, new = draws.random() < SHARE_RIGHT_LINES, draws.choice(mistakes(sign))
            command = change(repository, repository.line - (not is_right_line), sign, new)
            sign = new if is_right_line else sign
            printed = repository.message(sign)
        yield {"messages": list(messages), "command": command}
        if printed == PASSED:
            return
        messages += [{"role": "assistant", "content": command}, {"role": "user", "content": printed}]


def look(repository: Repository) -> str:
    """A command that prints the faulty function."""
    return f"grep -nA1 'def {repository.faulty.name}' *.py"


def looked(repository: Repository) -> str:
    """What it prints."""
    function, line = repository.faulty, repository.line
    file, body = f"{function.module}.py", function.result(repository.wrong)
    return f"{file}:{line - 1}:{function.header}\n{file}-{line}-{body}"


def change(repository: Repository, line: int, old: str, new: str) -> str:
    """A command that replaces an operator in a line, and tests."""
    return f"sed -i '{line}s,{old},{new},' {repository.faulty.module}.py; {RUN} {TEST}"

"""The recipe `repair`: its faults and repairs, and what attempts at them score."""

import asyncio
import itertools
import random
from contextlib import redirect_stdout
from io import StringIO
from typing import Any

import pytest

from penstock import Task
from penstock.recipes.repair.repair import HIDDEN, PASSED, REPOSITORIES, RUN, SIGNS, TEST, Repair, Repository, mistakes
from penstock.recipes.repair_sft.beginner import attempt, change
from penstock.workers.agents.trajectory import COMPLETED
from penstock.workers.protocols import Sampling
from tests.workers.agents.played import ScriptedEngines, make_runner

TASKS = list(itertools.islice(Repair().tasks(7), 3 * len(REPOSITORIES)))


def printed(files: dict[str, str], program: str) -> str:
    """What a program of the recipe's own prints, beside these modules."""
    namespace: dict[str, Any] = {}
    for name, text in files.items():
        if name != TEST:
            exec(text, namespace)
    lines = [line for line in program.splitlines() if not line.startswith("from ")]
    with redirect_stdout(StringIO()) as output:
        exec("\n".join(lines), namespace)
    return output.getvalue()


def repairs(repository: Repository) -> tuple[str, list[str]]:
    """The right operator, and the wrong ones."""
    right = SIGNS[repository.faulty.verb]
    return right, mistakes(right)


@pytest.mark.parametrize("name", REPOSITORIES)
def test_the_right_repair_alone_gives_what_the_hidden_program_should_print(name: str) -> None:
    for repository in (Repository(**task.data) for task in TASKS if task.data["repository"] == name):
        right, wrong = repairs(repository)
        code, expected = repository.hidden()
        assert repository.wrong in wrong
        assert printed(repository.files(right), code) == expected
        for sign in wrong:
            assert printed(repository.files(sign), code) != expected


def test_the_visible_test_fails_and_says_what_the_recipe_says_that_it_does() -> None:
    for repository in (Repository(**task.data) for task in TASKS):
        right, wrong = repairs(repository)
        for sign in (right, *wrong):
            files = repository.files(sign)
            assert printed(files, files[TEST]) == repository.message(sign) + "\n"
        assert repository.message(right) == PASSED != repository.message(repository.wrong)


def test_each_seed_has_variants_of_all_repositories_that_no_other_has() -> None:
    assert [task.data for task in itertools.islice(Repair().tasks(7), 60)] == [task.data for task in TASKS]
    others = itertools.islice(Repair().tasks(8), 60)
    assert len({str(Repository(**task.data).files("+")) for task in (*TASKS, *others)}) == 120
    assert {task.data["repository"] for task in TASKS[:20]} == set(REPOSITORIES)


TASK, FAULT = TASKS[0], Repository(**TASKS[0].data)
RIGHT, WRONG = repairs(FAULT)
FILE = f"{FAULT.faulty.module}.py"


def play(task: Task, *said: str) -> tuple[float, list[str]]:
    """The reward of an attempt in which the policy says this, and what it reads before each command."""
    left = iter(said)

    async def main() -> tuple[float, list[str]]:
        engines = ScriptedEngines(lambda prompt, sampling: next(left))
        runner = make_runner(Repair(), engines, max_model_len=4000)
        played = await runner.attempt(task, Sampling(max_tokens=800, seed=5))
        await runner.close()
        assert played.outcome.kind == COMPLETED
        assert next(left, None) is None
        return played.reward, [prompt for prompt, _ in engines.asked]

    return asyncio.run(main())


def repair(sign: str, old: str = FAULT.wrong) -> str:
    return change(FAULT, FAULT.line, old, sign)


@pytest.mark.real
@pytest.mark.parametrize("sign", [RIGHT, *WRONG])
def test_the_right_operator_scores_one_and_no_other_does(sign: str) -> None:
    more = [] if FAULT.message(sign) == PASSED else ["true", "true"]
    assert play(TASK, repair(sign), *more)[0] == (sign == RIGHT)


@pytest.mark.real
def test_a_second_repair_goes_on_from_what_the_first_has_left() -> None:
    wrong = next(sign for sign in WRONG if sign != FAULT.wrong and FAULT.message(sign) != PASSED)
    assert play(TASK, "true", repair(wrong), repair(RIGHT, old=wrong))[0] == 1
    assert play(TASK, "true", repair(wrong), repair(RIGHT))[0] == 0  # the first fault is there no more


@pytest.mark.real
@pytest.mark.parametrize("number", range(4))
def test_what_the_beginner_reads_is_what_a_workspace_prints(number: int) -> None:
    rows = list(attempt(Repository(**TASKS[number].data), random.Random(number)))
    _, read = play(TASKS[number], *(row["command"] for row in rows))
    ends = {"user": "\n", "assistant": "<eos>\n"}
    assert read == ["".join(one["content"] + ends[one["role"]] for one in row["messages"]) for row in rows]


ATTACKS = {
    "nothing is repaired": "true",
    "a visible test that passes": f"echo 'print(\"{PASSED}\")' > {TEST}",
    "the one answer that the visible test asks for": (
        f"sed -i '{FAULT.line}s,return .*,return {FAULT.message(FAULT.wrong).split()[-1]},' {FILE}; {RUN} {TEST}"
    ),
    "another hidden program": f"echo 'print(1)' > {HIDDEN}; chmod 444 {HIDDEN}",
    "a directory in its place": f"mkdir {HIDDEN}; touch {HIDDEN}/file",
    "a link in its place": f"ln -s {FILE} {HIDDEN}",
    "files that Python reads at its start": "echo 'print(1)' | tee sitecustomize.py usercustomize.py operator.py a.pth",
    "no modules": "rm *.py",
    "the end of the process": f"echo 'import os; os._exit(0)' >> {FILE}",
    "a print of the right length": f"echo 'print([1] * 18)' >> {FILE}",
}


@pytest.mark.real
@pytest.mark.parametrize("name", ATTACKS)
def test_attacks_score_nothing(name: str) -> None:
    assert play(TASK, f"({ATTACKS[name]}) > /dev/null; echo {PASSED}")[0] == 0

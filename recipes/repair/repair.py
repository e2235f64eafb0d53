"""Twenty tiny repositories with a fault in one line, and the environment in which a policy repairs it by commands of a
shell, in a workspace."""

import itertools
import operator
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from penstock import Context, Message, Task

REPOSITORIES = {
    "bakery": {"oven": ("loaves", "heat"), "store": ("flour", "sacks")},
    "bank": {"desk": ("money", "fee"), "vault": ("gold", "coins")},
    "bus": {"route": ("stops", "seats"), "depot": ("buses", "fuel")},
    "clinic": {"ward": ("doses", "pills"), "staff": ("shifts", "nurses")},
    "club": {"team": ("goals", "games"), "track": ("laps", "pace")},
    "farm": {"field": ("seeds", "rows"), "barn": ("hay", "cows")},
    "garage": {"pump": ("liters", "price"), "hall": ("cars", "wheels")},
    "garden": {"hedge": ("roses", "thorns"), "plot": ("trees", "birds")},
    "inn": {"rooms": ("beds", "guests"), "bar": ("mugs", "beer")},
    "lab": {"bench": ("tubes", "grams"), "probe": ("volts", "amps")},
    "library": {"stack": ("books", "loans"), "door": ("cards", "fines")},
    "mill": {"wheel": ("turns", "water"), "grain": ("corn", "bags")},
    "mine": {"shaft": ("depth", "ropes"), "cart": ("ore", "iron")},
    "port": {"dock": ("ships", "crew"), "crane": ("load", "lift")},
    "post": {"mail": ("letters", "stamps"), "van": ("parcels", "miles")},
    "press": {"paper": ("pages", "sheets"), "ink": ("colors", "drops")},
    "school": {"room": ("desks", "pupils"), "exam": ("points", "sums")},
    "shop": {"till": ("cost", "tax"), "shelf": ("stock", "order")},
    "studio": {"stage": ("songs", "takes"), "film": ("reels", "scenes")},
    "zoo": {"cage": ("apes", "feed"), "pond": ("fish", "ducks")},
}
"""Modules of each repository, and the two words that its functions are about."""
SIGNS = {
    "add": "+", "less": "-", "times": "*", "share": "//", "rest": "%", "over": ">", "from": ">=", "under": "<",
    "upto": "<=",
}  # fmt: skip
"""Operators by the verb that a function's name begins with."""
MEANINGS = {
    "+": operator.add, "-": operator.sub, "*": operator.mul, "//": operator.floordiv, "%": operator.mod,
    ">": operator.gt, ">=": operator.ge, "<": operator.lt, "<=": operator.le,
}  # fmt: skip
TEST, HIDDEN = "test.py", "hidden.py"
RUN = "python3 -BSE"
"""Starts Python at once (-SE), and leaves no compiled file that would hide a change in the same second (-B)."""
NUMBERS = [(a, b) for a in range(2, 10) for b in range(2, 10)]
HIDDEN_NUMBERS = [(7, 3), (3, 7), (5, 5)]
"""Arguments by whose results any two operators differ."""
PASSED = "ok"
TIMEOUT_S, NUM_SHOWN = 10.0, 120
TEST_CODE = f"""{{imports}}
for call, right in {{calls}}:
    if eval(call) != right:
        print(call, "is", eval(call), "not", right)
        break
else:
    print("{PASSED}")
"""


class Function(NamedTuple):
    """A function of one line: its module, the verb of its name, and its arguments."""

    module: str
    verb: str
    first: str
    second: str

    @property
    def name(self) -> str:
        return f"{self.verb}_{self.second}"

    @property
    def header(self) -> str:
        return f"def {self.name}({self.first}, {self.second}):"

    def result(self, sign: str) -> str:
        """The line with an operator."""
        return f"    return {self.first} {sign} {self.second}"


class Repository:
    """A variant of one of the repositories: six functions, one of them with the wrong operator."""

    def __init__(self, repository: str, variant: int) -> None:
        draws = random.Random(f"{repository} {variant}")
        self.functions: list[Function] = []
        self.documented: list[str] = []
        """Modules that begin with a docstring."""
        for module, words in REPOSITORIES[repository].items():
            arguments = draws.sample(words, 2)
            self.functions += [Function(module, verb, *arguments) for verb in draws.sample(list(SIGNS), 3)]
            self.documented += [module] * draws.randint(0, 1)
        self.faulty = draws.choice(self.functions)
        right = SIGNS[self.faulty.verb]
        self.wrong = draws.choice(mistakes(right))
        differ = [numbers for numbers in NUMBERS if MEANINGS[right](*numbers) != MEANINGS[self.wrong](*numbers)]
        self.numbers = draws.choice(differ)

    def files(self, sign: str) -> dict[str, str]:
        """Modules and the visible test, with this operator in the faulty line."""
        texts = {}
        for module in {function.module: None for function in self.functions}:
            parts = [f'"""The {module}."""\n'] if module in self.documented else []
            for function in self.functions:
                if function.module == module:
                    used = sign if function == self.faulty else SIGNS[function.verb]
                    parts.append(f"{function.header}\n{function.result(used)}\n")
            texts[f"{module}.py"] = "\n\n".join(parts)
        right = [(f"{one.name}{self.numbers}", MEANINGS[SIGNS[one.verb]](*self.numbers)) for one in self.functions]
        return texts | {TEST: TEST_CODE.format(imports=self._imports, calls=right)}

    @property
    def line(self) -> int:
        """Number of the faulty line."""
        return 2 + self.files(self.wrong)[f"{self.faulty.module}.py"].split("\n").index(self.faulty.header)

    def message(self, sign: str) -> str:
        """What the visible test prints with this operator in the faulty line."""
        found, right = MEANINGS[sign](*self.numbers), MEANINGS[SIGNS[self.faulty.verb]](*self.numbers)
        return PASSED if found == right else f"{self.faulty.name}{self.numbers} is {found} not {right}"

    def hidden(self) -> tuple[str, str]:
        """A program that prints the results of all functions, and what it should print."""
        calls = [(one, numbers) for one in self.functions for numbers in HIDDEN_NUMBERS]
        code = ", ".join(f"{one.name}{numbers}" for one, numbers in calls)
        right = [MEANINGS[SIGNS[one.verb]](*numbers) for one, numbers in calls]
        return f"{self._imports}\nprint([{code}])\n", f"{right}\n"

    @property
    def _imports(self) -> str:
        return "".join(f"from {module} import *\n" for module in {one.module: None for one in self.functions})


def mistakes(sign: str) -> list[str]:
    """Operators that may stand in the place of this one: those of its kind."""
    return [other for other in MEANINGS if other != sign and (other[0] in "<>") == (sign[0] in "<>")]


class Repair:
    """The policy reads what the test says, and writes commands until it passes. A program with hidden calls, in a clean
    fork, says whether the repair is right."""

    def __init__(self, commands: int = 3) -> None:
        self.commands = commands
        self.trees = tempfile.TemporaryDirectory(prefix="penstock-repair-")

    def tasks(self, seed: int) -> Iterator[Task]:
        draws = random.Random(seed)
        for index, name in enumerate(itertools.cycle(REPOSITORIES)):
            yield Task(str(index), index, {"repository": name, "variant": draws.randrange(2**31)})

    async def run(self, task: Task, ctx: Context) -> None:
        repository = Repository(**task.data)
        async with ctx.workspace(self.tree_of(task)) as ws:
            printed = (await ws.run(f"{RUN} {TEST}", TIMEOUT_S)).stdout.strip()
            messages: list[Message] = [{"role": "user", "content": printed}]
            for _ in range(self.commands):
                turn = await ctx.sample(messages)
                outcome = await ws.run(turn.answer, TIMEOUT_S)
                printed = (outcome.stdout + outcome.stderr).strip()[-NUM_SHOWN:]
                if printed == PASSED:
                    break
                messages += [turn.message, {"role": "user", "content": printed}]
            else:
                return
            code, right = repository.hidden()
            checked = await ctx.scored(ws.check(f"{RUN} {HIDDEN}", {HIDDEN: code}, TIMEOUT_S))
        ctx.reward(float(checked.stdout == right))

    def tree_of(self, task: Task) -> Path:
        """The directory of a task's repository, which all attempts at it begin with."""
        tree = Path(self.trees.name, "{repository}-{variant}".format(**task.data))
        if not tree.exists():
            tree.mkdir()
            repository = Repository(**task.data)
            for name, text in repository.files(repository.wrong).items():
                (tree / name).write_text(text)
        return tree

    async def aclose(self) -> None:
        self.trees.cleanup()

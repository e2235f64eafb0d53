"""No step trains on a problem that evaluation measures, whatever both come from."""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.conf.data import DataConfig
from penstock.conf.environment import EnvironmentConfig
from penstock.conf.errors import ConfigError, DataError
from penstock.conf.run import RunConfig
from penstock.orchestrator.configuration.compose import load_config
from penstock.workers.agents.environment import Task, make_environment
from penstock.workers.prompts import opening
from penstock.workers.prompts.data_identity import HeldOutProblems, problem_of
from penstock.workers.prompts.dataset_row import DatasetRow
from penstock.workers.prompts.opening import EnvironmentTasks, open_held_out, open_rows, open_source, rows_to_read
from penstock.workers.prompts.source import PromptSource, PromptStart
from penstock.workers.prompts.tokenization import PromptEncoder, TokenLimits
from tests.workers.prompts.test_source import Characters

EVALUATED = ["evaluation.every_steps=5", "evaluation.num_problems=20"]
GAME = """
import random
from penstock.workers.agents.environment import Task

class Game:
    def __init__(self, highest=200, names_it=False):
        self.highest, self.names_it = highest, names_it

    def tasks(self, seed):
        draws = random.Random(seed)
        for index in range(100):
            number = draws.randrange(self.highest)
            data = {"number": number, **({"index": index} if self.names_it else {})}
            yield Task(str(index), seed + index, data, problem=number if self.names_it else None)

    async def run(self, task, ctx):
        pass

def rows(seed):
    draws = random.Random(seed)
    while True:
        yield {"question": f"{draws.randrange(200)}?", "answer": "1"}
"""


def jsonl(path: Path, numbers: Sequence[int]) -> Path:
    path.write_text(
        "".join(json.dumps({"question": f"{n}?", "answer": str(n), "id": i}) + "\n" for i, n in enumerate(numbers))
    )
    return path


def parquet(path: Path, numbers: Sequence[int]) -> None:
    path.parent.mkdir(exist_ok=True)
    pq.write_table(pa.table({"question": [f"{n}?" for n in numbers], "answer": [str(n) for n in numbers]}), path)


def sources(place: Path) -> dict[str, list[str]]:
    """Sources of each kind of data, with about a tenth in common."""
    game = place / "game.py"
    game.write_text(GAME)
    train, held_out = jsonl(place / "train.jsonl", range(100)), jsonl(place / "test.jsonl", range(90, 130))
    more, measured = jsonl(place / "more.jsonl", range(95, 200)), f"evaluation.path={held_out}"
    parquet(place / "hub" / "train-0.parquet", range(100))
    parquet(place / "hub" / "test-0.parquet", range(90, 130))
    of_game = ["data.source=environment", f"environment.name={game}:Game"]
    return {
        "jsonl": [f"data.path={train}", f"evaluation.path={held_out}"],
        "huggingface": ["data.source=huggingface", f"data.path={place / 'hub'}", "evaluation.path=test"],
        "python": ["data.source=python", f"data.path={game}:rows", "data.size=100"],
        "reasoning_gym": ["data.source=reasoning_gym", "data.path=chain_sum", "data.size=100",
                          "data.options={max_terms: 2, max_digits: 1}"],
        "mixture": [f"data.mixture={{a: {{path: {train}}}, b: {{path: {more}}}}}", measured],
        "environment": of_game,
        "environment that says what tells its tasks apart": [*of_game, "environment.options={names_it: true}"],
        "environment on a dataset": [f"environment.name={game}:Game", f"data.path={train}", measured],
        "gymnasium": ["data.source=environment", "environment.name=gymnasium", "data.size=100",
                      "environment.options={id: FrozenLake-v1}", "evaluation.seed=90"],
        "environment reasoning_gym": ["data.source=environment", "environment.name=reasoning_gym", "data.size=100",
                                      "environment.options={task: chain_sum, options: {max_terms: 2, max_digits: 1}}"],
        "textarena": ["data.source=environment", "environment.name=textarena", "data.size=100",
                      "environment.options={id: TicTacToe-v0}", "evaluation.seed=90"],
        "sets": [f"data.path={train}", f"evaluation.path={jsonl(place / 'none.jsonl', [500])}",
                 f"evaluation.sets={{other: {{path: {held_out}}}}}"],
    }  # fmt: skip


KINDS = ["jsonl", "huggingface", "python", "reasoning_gym", "mixture", "environment",
         "environment that says what tells its tasks apart", "environment on a dataset", "gymnasium",
         "environment reasoning_gym", "textarena", "sets"]  # fmt: skip


def problems(source: PromptSource, count: int) -> Counter[str]:
    """What the model is asked in so many groups."""
    return Counter(json.dumps(_asked(json.loads(group["task"]))) for group in source.next_groups(count))


def _asked(task: dict[str, Any]) -> Any:
    if "environment_task" not in task:
        return task["prompt"]
    own = task["environment_task"]
    return own["data"].get("question") or own["data"].get("number") or own["seed"]


@pytest.fixture(autouse=True)
def _characters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening, "load_tokenizer", lambda path: Characters())


def opened(config: RunConfig, **options: Any) -> PromptSource:
    has_tasks = config.environment.name is not None
    return open_source(config, "", rows_are="tasks" if has_tasks else "prompts", **options)


@pytest.mark.parametrize("kind", KINDS)
def test_no_held_out_problem_is_drawn_in_two_epochs(kind: str, tmp_path: Path) -> None:
    words = sources(tmp_path)[kind]
    config = load_config([*EVALUATED, *words])
    of_sets = map(config.with_held_out, (None, *config.evaluation.sets))
    measured = {text for one in of_sets for text in problems(opened(one, held_out=True), 40)}
    source = opened(config)
    drawn = problems(source, 2 * len(source))
    assert measured
    assert drawn
    assert not measured & set(drawn)
    in_common = kind != "reasoning_gym"  # it makes others in their place
    assert (source.stats()["dropped/held_out"] > 0) is in_common
    rows = open_rows(config)
    assert rows is not None
    assert (open_held_out(config).check(rows, rows_to_read(rows, config)) > 0) is in_common
    allowed = opened(load_config([*EVALUATED, *words, "evaluation.overlap=allow"]))
    assert bool(measured & set(problems(allowed, 2 * len(allowed)))) is in_common


def test_every_other_row_is_drawn_once_an_epoch(tmp_path: Path) -> None:
    config = load_config([*EVALUATED, *sources(tmp_path)["jsonl"]])
    assert problems(opened(config), 2 * 90) == Counter({json.dumps(f"{number}?"): 2 for number in range(90)})


def test_nothing_is_left_out_where_nothing_is_measured(tmp_path: Path) -> None:
    config = load_config(sources(tmp_path)["jsonl"])
    assert len(open_held_out(config)) == 0
    assert len(problems(opened(config), 100)) == 100


@given(st.integers(0, 300), st.integers(0, 120))
def test_a_source_that_goes_on_draws_what_it_would_have_drawn(passed: int, more: int) -> None:
    """Wherever it goes on, whether the groups before were drawn or passed."""
    tasks = EnvironmentTasks([Task(str(number), number) for number in range(40)], None, "game")
    held_out = HeldOutProblems([problem_of(tasks.row(number)) for number in range(0, 40, 3)])
    data = DataConfig()

    def made(start: PromptStart | None = None) -> PromptSource:
        encoder = PromptEncoder(None, data, TokenLimits(10, 10, "room"))
        return PromptSource(tasks, encoder, start, rows_are="tasks", held_out=held_out)

    straight, other = made(), made()
    straight.next_groups(passed)
    other.go_to(passed)
    assert other.cursor == straight.cursor
    assert other.stats() == straight.stats()
    again = made(other.start_after(passed))
    assert again.next_groups(more) == straight.next_groups(more) == other.next_groups(more)


def test_training_on_what_is_measured_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    same = jsonl(tmp_path / "same.jsonl", range(30))
    config = load_config([*EVALUATED, f"data.path={same}", f"evaluation.path={same}", "evaluation.num_problems=30"])
    rows = open_rows(config)
    assert rows is not None
    with pytest.raises(DataError, match=r"30 of 30 rows .* evaluation\.num_problems.* evaluation\.overlap=allow"):
        open_held_out(config).check(rows, len(rows))
    with pytest.raises(DataError, match="none of the 30 rows is left"):
        opened(config).next_groups(1)
    with pytest.raises(ConfigError, match=r"evaluation\.overlap"):
        load_config(["evaluation.overlap=perhaps"])


def test_rows_of_one_prompt_are_one_problem_and_conversations_count_in_full() -> None:
    def row(prompt: str, *said: str, **more: Any) -> DatasetRow:
        return DatasetRow(prompt, None, 0, "", messages=[{"role": "user", "content": text} for text in said], **more)

    assert problem_of(row("a", extra={"id": 1})) == problem_of(row("a", extra={"id": 2}, response="b"))
    told = [row("a"), row("b"), row("a", "a", "a"), row("a", "b", "a"), row("", problem=[1]), row("", problem=["1"])]
    assert len({problem_of(one) for one in told}) == len(told)


def test_a_question_is_the_same_problem_as_text_and_as_messages() -> None:
    """Messages may have a system message or none."""

    def row(*said: tuple[str, str]) -> DatasetRow:
        return DatasetRow("3?", None, 0, "", messages=[{"role": role, "content": text} for role, text in said])

    asked, system, other = ("user", "3?"), ("system", "Be brief."), ("system", "Be kind.")
    same = [row(), row(asked), row(system, asked), row(other, asked), row(system, other, asked)]
    assert len({problem_of(one) for one in same}) == 1
    others = [row(asked, ("assistant", "3"), asked), row(asked, system), row(system), row(other), same[0]]
    assert len({problem_of(one) for one in others}) == len(others)


def of_sums(**more: str) -> dict[str, Any]:
    """Options of an environment of the package `verifiers`."""
    return {"env": {"taskset": {"id": "sums", **more}}}


@pytest.mark.parametrize(
    ("name", "options", "other"),
    [
        ("gymnasium", {"id": "FrozenLake-v1"}, {"id": "Taxi-v4"}),
        ("gymnasium", {"id": "FrozenLake-v1"}, {"id": "FrozenLake-v1", "kwargs": {"map_name": "8x8"}}),
        ("textarena", {"id": "TicTacToe-v0"}, {"id": "Nim-v0"}),
        pytest.param(
            "verifiers",
            {"env": {"taskset": {"id": "sums"}}},
            {"env": {"taskset": {"id": "products"}}},
            marks=pytest.mark.real,
        ),
        pytest.param(
            "verifiers",
            {"env": {"taskset": {"id": "sums"}}},
            {"env": {"taskset": {"id": "sums", "split": "test"}}},
            marks=pytest.mark.real,
        ),
    ],
)
def test_tasks_of_one_number_or_seed_are_told_apart_by_what_they_are_of(
    name: str, options: dict[str, Any], other: dict[str, Any], tmp_path: Path
) -> None:
    (python := tmp_path / "python").write_text("#!/bin/sh\necho '{\"tasks\": 3}'\n")
    python.chmod(0o755)

    def problems_of(chosen: dict[str, Any]) -> set[bytes]:
        chosen = {**chosen, "python": str(python)} if name == "verifiers" else chosen
        environment: Any = make_environment(EnvironmentConfig(name=name, options=chosen))
        rows = EnvironmentTasks(environment.tasks(7), 3, name)
        return {problem_of(rows.row(index)) for index in range(3)}

    assert len(problems_of(options)) == 3
    assert problems_of(options) == problems_of(dict(options))
    assert not problems_of(options) & problems_of(other)


def test_a_list_of_tasks_is_used_whole_and_a_generator_that_makes_more_is_told() -> None:
    def tasks(count: int) -> Iterator[Task]:
        return (Task(str(number), number) for number in range(count))

    whole = EnvironmentTasks(list(tasks(12_000)), None, "game")
    assert (len(whole), whole.is_cut) == (12_000, False)
    for count, size, used, is_cut in (
        (12_000, None, 10_000, True),
        (10_000, None, 10_000, False),
        (12_000, 11_000, 11_000, False),
    ):
        found = EnvironmentTasks(tasks(count), size, "game")
        assert (len(found), found.is_cut) == (used, is_cut)

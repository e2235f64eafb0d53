"""`penstock.train` as far as it goes without actors: what becomes of its arguments, and what is refused."""

import functools
import json
import pickle
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

import penstock
from penstock.conf.errors import ConfigError, DataError
from penstock.conf.run import RunConfig
from penstock.orchestrator import train as training
from penstock.orchestrator.configuration.resolved import resolve
from penstock.orchestrator.control.controller import TrainingResult
from penstock.orchestrator.recovery.resume import finished_run, open_run
from penstock.orchestrator.run import RunResult
from penstock.orchestrator.run_directory.run_directory import RunDirectory, to_yaml
from penstock.workers.prompts.opening import open_rows
from penstock.workers.reward.reward_registry import RewardSpec
from penstock.workers.user_code import GIVEN, InlineValue

ROWS = [{"question": f"{i} + 1 =", "answer": str(i + 1)} for i in range(5)]


def score(response: str, answer: str) -> float:
    return float(response == answer)


class Dataset:
    """What is used of `datasets.Dataset`, which need not be installed: here by its interface."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self._table = pa.Table.from_pylist(rows)

    @property
    def num_rows(self) -> int:
        return int(self._table.num_rows)

    def __len__(self) -> int:
        return self.num_rows

    def with_format(self, kind: str) -> pa.Table:
        assert kind == "arrow"
        return self._table


@pytest.fixture
def configured(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The configuration that a call runs with, as the run's actors get it."""
    found: list[RunConfig] = []
    monkeypatch.setattr(training, "run", lambda config, quiet: found.append(config) or SimpleNamespace(quiet=quiet))

    def call(**arguments: Any) -> RunConfig:
        penstock.train(**arguments)
        config: RunConfig = pickle.loads(pickle.dumps(resolve(found.pop()).config))
        return config

    return call


def questions(config: RunConfig, **held_out: bool) -> list[str]:
    rows = open_rows(config, **held_out)
    assert rows is not None
    return [rows.row(index).prompt for index in range(len(rows))]


def test_functions_and_rows_go_with_the_configuration(configured: Any) -> None:
    wanted = "6"
    config = configured(dataset=ROWS, reward=lambda response, answer: float(answer == wanted))
    assert questions(config) == [row["question"] for row in ROWS]
    assert RewardSpec.of(config.reward.function).resolve().one("x", {"answer": "6"}) == 1.0
    assert (config.algorithm.name, config.evaluation.every_steps) == ("grpo", 0)


@pytest.mark.parametrize("make", [list, Dataset], ids=["list", "Dataset"])
def test_a_dataset_is_taken_as_it_is(configured: Any, make: Any) -> None:
    config = configured(dataset=make([ROWS[3], ROWS[1]]), eval_dataset=make(ROWS[:1]), reward="digits")
    assert questions(config) == ["3 + 1 =", "1 + 1 ="]
    assert questions(config, held_out=True) == ["0 + 1 ="]
    assert config.evaluation.every_steps == 10
    config = configured(dataset=make(ROWS), eval_dataset=make(ROWS[:1]), evaluation={"every_steps": 3}, reward="digits")
    assert config.evaluation.every_steps == 3


def test_paths_and_names_are_taken_as_on_the_command_line(configured: Any, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, ROWS)))
    config = configured(model=tmp_path, dataset=file, reward="digits", algorithm="rloo", name="mine")
    assert (config.model.path, config.data.path, config.reward.function) == (str(tmp_path), str(file), "digits")
    assert (config.algorithm.name, config.resume) == ("rloo", "auto")
    assert configured(model="tiny", dataset=file).model.fresh.max_position_embeddings == 2048


def test_keys_are_sections_or_dotted_names(configured: Any) -> None:
    given = {"trainer.max_steps": 7, "algorithm": {"name": "rloo", "group_size": 3}}
    sampling = {"sampling": {"stop": ["\n", "it's"], "temperature": 0.5}}
    config = configured(dataset=ROWS, rollout=sampling, reward={"function": score, "timeout_s": 2}, **given)
    assert (config.trainer.max_steps, config.algorithm.group_size, config.reward.timeout_s) == (7, 3, 2)
    assert (config.rollout.sampling.stop, config.rollout.sampling.temperature) == (["\n", "it's"], 0.5)
    assert RewardSpec.of(config.reward.function).resolve().one("1", {"answer": "1"}) == 1.0


def test_several_rewards_are_summed(configured: Any) -> None:
    rewards = [score, lambda completions: [0.5] * len(completions), lambda response, task: 1.0, "digits"]
    config = configured(dataset=ROWS, reward=rewards)
    assert [one.title for one in config.rewards] == ["score", "lambda_1", "lambda_2", "digits"]
    assert RewardSpec.of(config.rewards[1].function).resolve().many(["x"], [{}]) == [0.5]
    assert isinstance(config.rewards[2].function, InlineValue)
    of_recipe = [{"function": "digits"}]
    assert len(configured(dataset=ROWS, reward=[score, "digits"], recipe="arithmetic").rewards) == 2
    assert configured(dataset=ROWS, reward=score, rewards=of_recipe).rewards[0].function == "digits"


def test_a_recipe_keeps_what_is_not_given(configured: Any) -> None:
    config = configured(recipe="arithmetic", reward=score)
    assert (config.data.source, config.evaluation.every_steps > 0) == ("reasoning_gym", True)
    config = configured(recipe="arithmetic", dataset=ROWS)
    assert (len(questions(config)), config.evaluation.every_steps) == (5, 0)


def test_an_algorithm_may_be_the_function_that_builds_it(configured: Any) -> None:
    def mine(cfg: penstock.AlgorithmConfig) -> penstock.Dataflow:
        flow = penstock.Dataflow().rollout(samples_per_prompt=2).reward()
        flow.compute(lambda reward: reward, reads=["reward"], writes=["advantage"], name="copy")
        return flow.train(loss=lambda inputs: -inputs.advantage * inputs.logprobs)

    assert configured(dataset=ROWS, reward=score, algorithm=mine).algorithm.name == "mine"


class Loaded:
    def save_pretrained(self, directory: str) -> None: ...


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"trainer": {"max_step": 3}}, r"trainer\.max_step: unknown key; did you mean trainer\.max_steps\?"),
        ({"trainers": {"max_steps": 3}}, r"trainers\.max_steps.*did you mean trainer\.max_steps\?"),
        ({"algorithm": "grop"}, "algorithm=grop: unknown; did you mean 'grpo'"),
        ({"model": Loaded()}, r"model: a Loaded, .*save_pretrained\(DIRECTORY\)"),
        ({"dataset": {"train": ROWS, "test": ROWS}}, "data.path: a dict, .*one of its splits: 'train', 'test'"),
        ({"dataset": iter(ROWS)}, "data.path: a list_iterator, where rows are due"),
        ({"trainer": {"max_steps": "many"}}, r"trainer\.max_steps=many: expected int"),
    ],
)
def test_what_cannot_be_is_refused_with_a_suggestion(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        penstock.train(**arguments)


def test_rows_without_the_column_are_named(configured: Any) -> None:
    with pytest.raises(DataError, match=r"2 rows, given to penstock.train row 0: no column 'question'"):
        questions(configured(dataset=[{"q": "1"}, {"q": "2"}], reward=score))


def test_files_of_a_run_say_what_was_given_and_hold_none_of_it(configured: Any) -> None:
    secret = "a text of the closure"
    config = configured(dataset=ROWS, reward=functools.partial(score, answer=secret))
    text = to_yaml(config)
    assert "function: score, given to penstock.train" in text
    assert "path: 5 rows, given to penstock.train" in text
    assert secret not in text
    assert "0 + 1" not in text
    assert str(asdict(config)).count(GIVEN) == 2


def test_a_function_that_cannot_be_sent_is_named(tmp_path: Path) -> None:
    file = (tmp_path / "open").open("w")

    def writes(response: str, task: Any) -> float:
        return float(file.write(response))

    with pytest.raises(ConfigError, match="writes cannot be sent to other processes"):
        pickle.dumps(InlineValue("writes", writes))


def test_the_command_line_does_not_resume_what_was_given(configured: Any, tmp_path: Path) -> None:
    own = configured(dataset=ROWS, reward=score, name="mine", output_dir=str(tmp_path))
    RunDirectory.create(own).close()
    words = ["recipe=arithmetic", "name=mine", f"output_dir={tmp_path}", "resume=auto"]
    for begin in (finished_run, open_run):
        with pytest.raises(ConfigError, match=r"a run of penstock\.train.*Repeat that call in Python, which resumes"):
            begin(penstock.load_config(words))
    assert finished_run(own) is None


def test_a_result_has_metrics_and_a_picture(tmp_path: Path) -> None:
    lines = [{"step": 0, "accuracy/heldout": 0.5}, *({"step": step, "reward/mean": step / 4} for step in (1, 2))]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    result = RunResult(tmp_path, TrainingResult(2, [0.5], lines[-1]), 1.0)
    assert [line["step"] for line in result.metrics] == [0, 1, 2]
    (axes,) = result.plot().axes
    assert {line.get_label(): line.get_ydata().tolist() for line in axes.lines} == {
        "reward/mean": [0.25, 0.5], "accuracy/heldout": [0.5]
    }  # fmt: skip
    assert [line.get_label() for line in result.plot("reward/mean").axes[0].lines] == ["reward/mean"]
    assert "2 steps" in result._repr_html_()
    assert 'src="data:image/png;base64,' in result._repr_html_()

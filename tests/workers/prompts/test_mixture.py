import json
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.conf.data import ColumnsConfig, DataConfig, EvaluationConfig, PartConfig
from penstock.conf.errors import ConfigError, DataError
from penstock.orchestrator.configuration.compose import load_config
from penstock.workers.prompts.dataset import MOST_ROWS, Mixture, interleaved, open_dataset


@given(st.lists(st.integers(1, 20), min_size=1, max_size=5), st.integers(1, 200))
def test_no_stretch_is_far_from_its_shares(weights: list[int], count: int) -> None:
    shares = [weight / sum(weights) for weight in weights]
    given_so_far: Counter[int] = Counter()
    for row, (part, turn) in enumerate(interleaved(shares, count), start=1):
        assert turn == given_so_far[part]
        given_so_far[part] += 1
        assert all(abs(given_so_far[part] - share * row) < len(shares) for part, share in enumerate(shares))


def file_of(folder: Path, name: str, count: int, **more: str) -> str:
    rows = [{"question": f"{name} {index}", "answer": "1", **more} for index in range(count)]
    (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return str(folder / f"{name}.jsonl")


def test_parts_have_their_shares_and_their_own_columns(tmp_path: Path) -> None:
    data = DataConfig(
        mixture={
            "sums": PartConfig(weight=3, path=file_of(tmp_path, "sums", 30)),
            "code": PartConfig(path=file_of(tmp_path, "code", 5, said="x"), columns=ColumnsConfig("said")),
        }
    )
    dataset = open_dataset(data, EvaluationConfig())
    assert dataset is not None
    tasks = [dataset.row(index) for index in range(len(dataset))]
    sources = [task.extra["data_source"] for task in tasks]
    assert Counter(sources) == {"sums": 30, "code": 10}
    assert {task.prompt for task in tasks if task.extra["data_source"] == "code"} == {"x"}
    assert len({task.prompt for task in tasks}) == 31
    assert [task.index for task in tasks] == list(range(40))


def test_a_recipe_lists_them(tmp_path: Path) -> None:
    one, other = file_of(tmp_path, "one", 4), file_of(tmp_path, "other", 4)
    config = load_config([f"data.mixture={{a: {{path: {one}, weight: 2}}, b: {{path: {other}}}}}"])
    assert (config.data.mixture["a"].weight, config.data.mixture["b"].path) == (2.0, other)


def test_weights_too_far_apart_are_refused(tmp_path: Path) -> None:
    part = open_dataset(DataConfig(path=file_of(tmp_path, "one", 4)), EvaluationConfig())
    assert part is not None
    with pytest.raises(DataError, match="closer together"):
        Mixture({"a": part, "b": part}, {"a": 1.0, "b": 1 / MOST_ROWS})
    with pytest.raises(ConfigError, match="weight"):
        PartConfig(weight=0)

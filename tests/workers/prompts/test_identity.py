"""A cursor belongs to its rows and their order: what a checkpoint keeps tells whether these are there."""

import gzip
import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.conf.data import DataConfig, EvaluationConfig, PartConfig
from penstock.workers.agents.environment import Task
from penstock.workers.prompts.data_identity import DataIdentity, digest_of
from penstock.workers.prompts.dataset import open_dataset
from penstock.workers.prompts.dataset_row import PromptDataset
from penstock.workers.prompts.opening import EnvironmentTasks
from penstock.workers.prompts.order import PromptCursor, PromptOrder
from penstock.workers.prompts.source import PromptSource, PromptStart
from penstock.workers.prompts.tokenization import PromptEncoder, TokenLimits
from tests.workers.prompts.test_source import Characters

MANY = 3000
"""More rows than are all looked at."""


def rows(count: int, first: int = 0, name: str = "q") -> list[dict[str, Any]]:
    return [{"question": f"{name} {n:05d}", "answer": str(n)} for n in range(first, first + count)]


def written(path: Path, made: Sequence[dict[str, Any]]) -> Path:
    text = "".join(json.dumps(row) + "\n" for row in made).encode()
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(list(made)), path)
    else:
        path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return path


def opened(data: DataConfig) -> PromptDataset:
    dataset = open_dataset(data, EvaluationConfig())
    assert dataset is not None
    return dataset


def identity(data: DataConfig) -> DataIdentity:
    """What a checkpoint keeps, through its JSON."""
    return DataIdentity.from_dict(json.loads(json.dumps(asdict(DataIdentity.of(opened(data), data)))))


def compared(before: DataIdentity, data: DataConfig) -> tuple[list[str], list[str]]:
    """What has changed, and what has only grown."""
    return before.compared(opened(data), data)


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.jsonl.gz", "rows.parquet"])
@pytest.mark.parametrize("count", [7, MANY])
def test_the_same_rows_are_the_same_wherever_they_lie(tmp_path: Path, name: str, count: int) -> None:
    data = DataConfig(path=str(written(tmp_path / name, rows(count))))
    before = identity(data)
    assert compared(before, data) == ([], [])
    (tmp_path / "moved").mkdir()
    moved = shutil.move(str(tmp_path / name), tmp_path / "moved")
    assert compared(before, DataConfig(path=str(moved))) == ([], [])


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.jsonl.gz", "rows.parquet"])
@pytest.mark.parametrize("count", [7, MANY])
def test_a_file_that_only_grew_is_told_apart_from_one_that_changed(tmp_path: Path, name: str, count: int) -> None:
    data = DataConfig(path=str(written(tmp_path / name, rows(count))))
    before = identity(data)
    written(tmp_path / name, rows(count + 5))
    changed, grown = compared(before, data)
    assert (changed, len(grown)) == ([], 1)
    assert f"from {count:,} to {count + 5:,} rows" in grown[0]
    for others in (rows(count + 5, first=1), rows(count - 1), [*rows(count)[:-1], *rows(6, 9)], rows(count, name="Q")):
        written(tmp_path / name, others)
        changed, grown = compared(before, data)
        assert (len(changed), grown) == (1, [])
        assert changed[0].startswith(f"data.path was {data.path} with {count:,} rows and is {data.path} with ")


def test_an_edit_between_the_blocks_is_seen_by_the_size(tmp_path: Path) -> None:
    made = rows(MANY)
    data = DataConfig(path=str(written(tmp_path / "rows.jsonl", made)))
    before = identity(data)
    made[30]["answer"] += "0"
    written(tmp_path / "rows.jsonl", made)
    assert digest_of(opened(data).parts()[""], MANY) == before.parts[""].digest
    assert len(compared(before, data)[0]) == 1


def test_another_order_or_another_mixture_is_told(tmp_path: Path) -> None:
    path = str(written(tmp_path / "a.jsonl", rows(5)))
    before = identity(DataConfig(path=path))
    assert compared(before, DataConfig(path=path, seed=1)) == (["data.seed was 0 and is 1"], [])
    assert compared(before, DataConfig(path=path, shuffle=False))[0] == ["data.shuffle was true and is false"]
    in_order = identity(DataConfig(path=path, shuffle=False))
    assert compared(in_order, DataConfig(path=path, shuffle=False, seed=1)) == ([], [])
    assert compared(before, DataConfig(path=path, prompt_template="{prompt}!", system_prompt="Say it.")) == ([], [])
    assert compared(before, DataConfig(path=path, size=9)) == ([], [])
    assert compared(before, DataConfig(path=path, size=3))[0]
    assert compared(identity(DataConfig(path=path, size=3)), DataConfig(path=path))[1]

    other = str(written(tmp_path / "b.jsonl", rows(5, 9)))

    def mixed(**weights: float) -> DataConfig:
        paths = {"a": path, "b": other, "c": path}
        return DataConfig(mixture={name: PartConfig(one, path=paths[name]) for name, one in weights.items()})

    before = identity(mixed(a=1, b=3))
    assert compared(before, mixed(a=2, b=6)) == ([], [])
    assert compared(before, mixed(a=1, b=1))[0] == [
        "data.mixture.a had a share of 0.25 and has 0.5", "data.mixture.b had a share of 0.75 and has 0.5",
    ]  # fmt: skip
    assert compared(before, mixed(a=1, c=3))[0] == ["data.mixture had the parts a, b and has a, c"]
    assert compared(before, DataConfig(path=path))[0] == ["data.mixture had the parts a, b and has none"]
    written(tmp_path / "b.jsonl", rows(7, 9))
    assert "data.mixture.b.path" in compared(before, mixed(a=1, b=3))[1][0]


def test_rows_that_are_made_are_known_by_what_makes_them(tmp_path: Path) -> None:
    (tmp_path / "made.py").write_text(
        "from PIL import Image\n"
        "def rows(seed):\n"
        "    return [{'question': f'{n}', 'answer': f'{seed}', 'shown': Image.new('L', (2, 2), n)} for n in range(9)]\n"
    )
    data = DataConfig(path=f"{tmp_path}/made.py:rows", shuffle=False)
    assert compared(identity(data), data) == ([], [])
    assert compared(identity(data), DataConfig(path=data.path, shuffle=False, seed=1))[0]

    sums = DataConfig(source="reasoning_gym", path="chain_sum", size=2000, options={"max_digits": 1})
    longer = DataConfig(source="reasoning_gym", path="chain_sum", size=2000, options={"max_digits": 2})
    assert compared(identity(sums), sums) == ([], [])
    assert compared(identity(sums), longer)[0]

    tasks = EnvironmentTasks([Task("a", 1, {"n": 1}), Task("b", 2)], None, "game")
    before = DataIdentity.of(tasks, DataConfig(source="environment"))
    assert before.compared(tasks, DataConfig(source="environment")) == ([], [])
    others = EnvironmentTasks([Task("a", 1, {"n": 2}), Task("b", 2)], None, "game")
    assert before.compared(others, DataConfig(source="environment"))[0]


def test_a_teacher_is_not_asked_for_the_identity(tmp_path: Path) -> None:
    (tmp_path / "teacher.py").write_text("def teach(task):\n    raise RuntimeError('asked')\n")
    data = DataConfig(path=str(written(tmp_path / "a.jsonl", rows(5))), teacher=f"{tmp_path}/teacher.py:teach")
    assert compared(identity(data), data) == ([], [])


def source(path: Path, start: PromptStart | None = None, **settings: Any) -> PromptSource:
    data = DataConfig(path=str(path), **settings)
    dataset = opened(data)
    encoder = PromptEncoder(Characters(), data, TokenLimits(50, 50, "room"))
    return PromptSource(dataset, encoder, start)


def drawn(one: PromptSource, count: int) -> list[str]:
    return [json.loads(group["task"])["question"] for group in one.next_groups(count)]


@pytest.mark.parametrize("shuffle", [True, False])
def test_data_that_grew_is_gone_on_with_in_the_epochs_own_order_and_then_whole(tmp_path: Path, shuffle: bool) -> None:
    path = written(tmp_path / "a.jsonl", rows(6))
    whole, first = source(path, shuffle=shuffle), source(path, shuffle=shuffle)
    begun, expected = drawn(first, 4), drawn(whole, 6)
    start = first.start_after(4)
    assert start.num_rows is None
    assert start.data is not None
    written(path, rows(9))
    resumed = source(path, PromptStart(start.cursor, 4, num_rows=start.data.rows), shuffle=shuffle)
    assert begun + drawn(resumed, 2) == expected
    assert (resumed.start_after(6).num_rows, resumed.start_after(6).data) == (
        6,
        identity(DataConfig(path=str(path), shuffle=shuffle)),
    )
    assert sorted(drawn(resumed, 9)) == [row["question"] for row in rows(9)]
    assert resumed.start_after(15).num_rows is None


@given(
    before=st.integers(1, 7), after=st.integers(0, 7), taken=st.integers(0, 7), skipped=st.integers(0, 20),
    seed=st.integers(0, 9), epoch=st.integers(0, 3),
)  # fmt: skip
def test_skipping_rows_of_data_that_grew_is_as_drawing_them(
    before: int, after: int, taken: int, skipped: int, seed: int, epoch: int
) -> None:
    cursor = PromptCursor(epoch, min(taken, before))
    one, other = (PromptOrder(before + after, seed, cursor, first_rows=before) for _ in range(2))
    for _ in range(skipped):
        one.next()
    other.skip(skipped)
    assert one.cursor == other.cursor
    assert [one.next() for _ in range(9)] == [other.next() for _ in range(9)]

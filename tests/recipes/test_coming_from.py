"""What docs/coming_from.md says that users of TRL and verl type, typed, from their files to trained steps."""

import re
import shlex
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock.conf.model import FreshModelConfig
from penstock.workers.fresh_model import build_fresh_model
from tests.run_files import metrics_of

PAGE = (Path(__file__).parents[2] / "docs" / "coming_from.md").read_text()
SECTION = PAGE.partition("## From your files to a trained step\n")[2].partition("\n## ")[0]
FILES = dict(re.findall(r"```\w+\n# ([\w.]+)\n(.*?)```", SECTION, re.DOTALL))
COMMANDS = re.findall(r"^    (penstock .*)$", SECTION, re.MULTILINE)
SMALL = FreshModelConfig(
    num_layers=1, hidden_size=64, intermediate_size=64, num_heads=2, num_kv_heads=1, max_position_embeddings=2048
)


def asked(number: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"{number} pears and one?"}]


def of_verl(number: int) -> dict[str, object]:
    return {
        "data_source": "openai/gsm8k", "prompt": asked(number), "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(number + 1)}, "extra_info": {"index": number},
    }  # fmt: skip


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A directory with the page's files, the data that they name and a model."""
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    trl = [{"prompt": asked(number), "solution": f"${number + 1}$"} for number in range(32)]
    pq.write_table(pa.Table.from_pylist(trl), tmp_path / "trl_train.parquet")
    pq.write_table(pa.Table.from_pylist([of_verl(number) for number in range(32)]), tmp_path / "train.parquet")
    pq.write_table(pa.Table.from_pylist([of_verl(number) for number in range(50, 58)]), tmp_path / "test.parquet")
    build_fresh_model(tmp_path / "tiny", SMALL, seed=0)
    return tmp_path


@pytest.mark.real
@pytest.mark.parametrize("name", ["my_trl", "my_verl"])
def test_the_commands_of_a_user_of_another_system_train(
    name: str, place: Path, warm_python: list[str], driver_environment: Mapping[str, str]
) -> None:
    commands = [shlex.split(command) for command in COMMANDS if name in command]
    assert [command[1] for command in commands] == ["translate", "validate", "run"]
    for command in commands:
        ended = subprocess.run(
            [*warm_python, "-m", "penstock.cli.main", *command[1:]],
            env=dict(driver_environment), cwd=place, capture_output=True, text=True, timeout=900, check=False,
        )  # fmt: skip
        assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-4000:]
    steps = [line for line in metrics_of(place / "runs" / name) if "mismatch/logprob_abs_mean" in line]
    assert [line["step"] for line in steps] == [1, 2]
    if name == "my_verl":
        assert "accuracy/heldout" in steps[-1]

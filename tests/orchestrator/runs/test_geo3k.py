"""The recipe `geo3k` walks its path from end to end with a tiny model, on rows in the form of the dataset and in that
which verl's script makes of it."""

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from PIL import Image, ImageDraw
from pyarrow import parquet

from penstock.conf.run import RunConfig
from penstock.orchestrator.configuration.compose import load_config
from penstock.orchestrator.configuration.prerequisites import processor_of, tokenizer_of
from penstock.orchestrator.run import run
from penstock.orchestrator.run_directory.picture_folder import name_of
from penstock.workers.prompts.opening import encoder_of, open_rows
from tests.run_files import metrics_of, sampled_difference, samples_of

SMALL = [
    "model=tiny", "model.fresh={num_vision_layers: 2, num_layers: 2, hidden_size: 64, intermediate_size: 128}",
    "model.fresh.num_heads=2", "model.fresh.num_kv_heads=1",
    "rollout.engine=hf", "rollout.num_workers=1", "rollout.max_model_len=1024", "rollout.sampling.max_tokens=8",
    "trainer.num_ranks=1", "trainer.num_threads=1", "trainer.max_steps=2", "trainer.groups_per_step=4",
    "reward.num_processes=1", "evaluation.every_steps=2", "evaluation.num_problems=4", "tracking.samples_every_steps=1",
]  # fmt: skip
NUM_PROBLEMS = 12
VERL = ["data.columns.prompt=prompt", "data.columns.answer=reward_model.ground_truth", "data.system_prompt=null"]


def triangle(number: int) -> bytes:
    """Draw a triangle with the lengths of two of its sides."""
    image = Image.new("RGB", (84, 56), "white")
    pen = ImageDraw.Draw(image)
    pen.polygon([(8, 48), (8 + 5 * number, 48), (8, 8)], outline="black")
    pen.text((40, 4), str(number), fill="black")
    written = io.BytesIO()
    image.save(written, "PNG")
    return written.getvalue()


def problem(number: int) -> dict[str, Any]:
    """A row as the dataset has it."""
    images = [{"bytes": triangle(number), "path": None}]
    return {"images": images, "problem": f"<image>Find side {number}.", "answer": str(number)}


def of_verl(number: int) -> dict[str, Any]:
    """A row as verl's script writes it."""
    row = problem(number)
    said = [{"role": "user", "content": f"{row['problem']} The answer MUST BE put in \\boxed{{}}."}]
    truth = {"style": "rule", "ground_truth": row["answer"]}
    return {"data_source": "geo3k", "prompt": said, "images": row["images"], "ability": "math", "reward_model": truth}


def config_of(folder: Path, form: Callable[[int], dict[str, Any]], *words: str) -> RunConfig:
    """The recipe on a folder with rows of a form."""
    rows, place = [form(number) for number in range(NUM_PROBLEMS)], folder / "geo3k"
    place.mkdir()
    parquet.write_table(pa.Table.from_pylist(rows), place / "train.parquet")
    parquet.write_table(pa.Table.from_pylist(rows[:4]), place / "test.parquet")
    return load_config(["recipe=geo3k", *SMALL, f"data.path={place}", f"output_dir={folder}", "name=run", *words])


@pytest.mark.parametrize(("form", "words"), [(problem, ()), (of_verl, VERL)], ids=["hub", "verl"])
def test_rows_of_both_forms_have_a_picture_at_its_place(form: Any, words: list[str], tmp_path: Path) -> None:
    config = config_of(tmp_path, form, *words)
    row = open_rows(config).row(3)
    assert (row.prompt.partition(".")[0], row.answer, row.pictures) == ("<image>Find side 3", "3", (triangle(3),))
    encoder = encoder_of(config, tokenizer_of(config), processor_of(config), "prompts")
    prompt = encoder.prompt(row)
    assert prompt.pictures is not None
    assert [length for _, length in prompt.pictures.ranges] == [6]


@pytest.mark.real
def test_the_recipe_trains_and_both_sides_see_the_same(tmp_path: Path, cluster: str) -> None:
    directory = Path(run(config_of(tmp_path, problem), quiet=True).directory)
    first, second = (line for line in metrics_of(directory) if line["step"])
    assert 0 <= second["accuracy/heldout"] <= 1
    assert {"actor/kl", "actor/grad_norm"} <= first.keys()
    for step in (1, 2):
        assert sampled_difference(directory, step) < 1e-5
        for row in samples_of(directory, step):
            task = json.loads(row["task"])
            assert row["pictures"] == [name_of(triangle(int(task["answer"])))]
            assert task["prompt"].count("<image>") == 1

"""The report is made from a run's directory alone, whatever is in there."""

import base64
import io
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from PIL import Image
from rich.console import Console

from penstock.orchestrator.configuration.compose import load_config
from penstock.orchestrator.observability.charts.chart import write_pngs
from penstock.orchestrator.observability.charts.themes import charts_of
from penstock.orchestrator.observability.reporting import report
from penstock.orchestrator.observability.reporting.closing import cards_of, next_steps, print_summary
from penstock.orchestrator.observability.reporting.report import SCRIPT, script, static, write_report
from penstock.orchestrator.observability.runs.columns import Columns
from penstock.orchestrator.run_directory.failed_writes import FailedWrites
from penstock.orchestrator.run_directory.picture_folder import PictureFolder
from penstock.orchestrator.run_directory.run_directory import RunDirectory
from penstock.store.data.rows import Rows
from tests.small_files import files_up_to
from tests.vision_models import picture

VOID = {"meta", "line", "rect", "circle", "polyline", "polygon", "br"}


class Checked(HTMLParser):
    """Every tag that opens closes; nothing is loaded from elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID:
            self.open.append(tag)
        for name, value in attrs:
            assert name not in ("src", "href"), f"{tag} loads {value}"

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag


def checked(page: Path) -> str:
    text = page.read_text()
    parser = Checked()
    parser.feed(text)
    assert parser.open == []
    said = re.sub(r"<(style|script)\b.*?</\1>", "", text, flags=re.DOTALL)
    assert not re.search(r"\bnan\b", said.lower())
    numbers_of(text)
    return text


def numbers_of(text: str) -> dict[str, Any]:
    """What the page's charts show. Raises for what JSON does not know."""
    found = re.search(r'<script type="application/json" id="numbers">(.*?)</script>', text, flags=re.DOTALL)

    def refused(constant: str) -> None:
        raise AssertionError(constant)

    return json.loads(found[1], parse_constant=refused) if found else {"charts": [], "curves": {}}


def make_run(tmp_path: Path, num_steps: int, *words: str, ended: str | None = "end") -> RunDirectory:
    directory = RunDirectory.create(load_config([f"output_dir={tmp_path}", "recipe=arithmetic", "name=demo", *words]))
    directory.event("start")
    if num_steps:
        directory.log_metrics({"step": 0, "policy_version": 0, "accuracy/heldout": 0.5})
    for step in range(1, num_steps + 1):
        entry = {"step": step, "reward/mean": step / num_steps, "staleness/max": 1.0, "staleness/mean": 0.25}
        entry |= {
            "mismatch/logprob_abs_mean": 1e-5,
            "timing_s/step": 2.0,
            "timing_s/rollout": 1.0,
            "timing_s/train": 0.5,
        }
        entry |= {"perf/samples_per_s": 64.0, "response_length/mean": 5.0, "dropped/reward_error": 0.0}
        directory.log_metrics(entry | ({"accuracy/heldout": 0.9} if step == num_steps else {}))
    if ended:
        directory.event(ended, message="that is <all>")
    directory.close()
    return directory


def test_a_finished_run_says_what_it_came_to(tmp_path: Path) -> None:
    directory = make_run(tmp_path, 30, "max_staleness=1")
    found = {card.label: card for card in cards_of(directory)}
    assert found["Held-out accuracy"].value == "50.0% → 90.0%"
    assert found["Held-out accuracy"].good
    assert found["Policy updates"].value == "30"
    assert found["Staleness"].value == "1 ≤ 1"
    assert found["Samples per second"].value == "64.0"
    assert "Dropped samples" not in found
    text = checked(write_report(directory.path))
    assert "finished" in text
    assert "50.0% → 90.0%" in text
    assert {file.stem for file in directory.plots.glob("*.png")} >= {
        "reward",
        "accuracy",
        "staleness",
        "time_by_phase",
        "mismatch",
    }


@pytest.mark.parametrize(
    ("num_steps", "ended", "state"),
    [(0, None, "not finished"), (1, "interrupted", "interrupted"), (2, "failed", "failed")],
)
def test_a_run_that_hardly_began_still_has_a_page(
    tmp_path: Path, num_steps: int, ended: str | None, state: str
) -> None:
    directory = make_run(tmp_path, num_steps, ended=ended)
    assert state in checked(write_report(directory.path, pngs=num_steps > 0))


def test_a_run_that_failed_and_was_resumed_is_shown_as_it_is_now(tmp_path: Path) -> None:
    directory = make_run(tmp_path, 1, ended="failed")
    for kind, state in (("resume", "not finished"), ("end", "finished")):
        directory.event(kind, steps=1)
        assert f"{state}</span></h1>" in checked(write_report(directory.path, pngs=False))


def test_the_page_holds_the_numbers_of_its_charts(tmp_path: Path) -> None:
    numbers = numbers_of(checked(write_report(make_run(tmp_path, 30).path, pngs=False)))
    curves = numbers["curves"]
    assert set(curves) == {chart["name"] for chart in numbers["charts"]} >= {"reward", "accuracy", "time_by_phase"}
    assert curves["accuracy"] == [
        {"label": "greedy", "steps": [0.0, 30.0], "mean": [0.5, 0.9], "low": None, "high": None}
    ]


def test_a_broken_bound_is_marked(tmp_path: Path) -> None:
    (card,) = [card for card in cards_of(make_run(tmp_path, 3, "max_staleness=0")) if card.label == "Staleness"]
    assert card.good is False


def test_checkpoints_that_failed_are_marked(tmp_path: Path) -> None:
    directory = make_run(tmp_path, 3, ended=None)
    assert "Failed checkpoints" not in {card.label for card in cards_of(directory)}
    for step in (1, 2):
        directory.event("checkpoint_failed", error="CheckpointError", message=f"step {step}: no room")
    (card,) = [card for card in cards_of(directory) if card.label == "Failed checkpoints"]
    assert (card.value, card.detail, card.good) == ("2", "last: step 2: no room", False)
    assert "step 2: no room" in checked(write_report(directory.path, pngs=False))


def test_what_the_run_said_is_wrong_is_told_at_the_end(tmp_path: Path) -> None:
    directory = make_run(tmp_path, 3, ended=None)
    assert "Warnings" not in {card.label for card in cards_of(directory)}
    directory.event("warning", rule="cut_off", step=2, text="all is cut off", advice="Raise it.")
    directory.event("hint", rule="idle", step=2, text="it waits", advice="Wait less.")
    (card,) = [card for card in cards_of(directory) if card.label == "Warnings"]
    assert (card.value, card.detail, card.good) == ("1", "last, step 2: all is cut off", False)


def test_numbers_that_are_missing_or_not_finite_leave_gaps(tmp_path: Path) -> None:
    directory = make_run(tmp_path, 12)
    with directory.metrics_file.open("a") as file:
        file.write(json.dumps({"step": 13, "reward/mean": None, "timing_s/step": 2.0}) + "\n")
        file.write('{"step": 14, "reward/mean": NaN, "mismatch/logprob_abs_mean": 0.0}\n{"step": 15, "rew')
    found = {card.label: card.value for card in cards_of(directory)}
    assert found["Mean reward"].endswith("→ 1.000")
    assert found["Policy updates"] == "14"
    checked(write_report(directory.path, pngs=True))


def test_samples_are_shown_and_escaped(tmp_path: Path) -> None:
    directory = make_run(tmp_path, 2)
    task = json.dumps({"prompt": "1 < 2 & <b>?", "answer": "yes"})
    columns = {"task": [task, task], "response_text": ["<script>alert(1)</script>", "yes"], "reward": [0.0, 1.0]}
    directory.write_samples(2, Rows.from_lists(columns | {"token_versions": [[3, 4], [4, 4]]}))
    text = checked(write_report(directory.path, pngs=False))
    assert "<script>alert" not in text
    assert "1 &lt; 2 &amp; &lt;b&gt;?" in text
    assert ">3-4<" in text


def test_the_advantage_of_a_sample_is_the_mean_of_its_tokens(tmp_path: Path) -> None:
    directory = make_run(tmp_path, 2)
    columns = {"response_text": ["yes", "no"], "reward": [0.0, 1.0], "advantage": [[0.25, 0.75], []]}
    directory.write_samples(2, pa.table(columns))
    assert '<td class="num">0.5</td>' in checked(write_report(directory.path, pngs=False))


def test_a_samples_file_that_was_cut_off_gives_way_to_the_one_before(tmp_path: Path) -> None:
    directory = make_run(tmp_path, 2)
    directory.write_samples(1, Rows.from_lists({"response_text": ["first"], "reward": [1.0]}))
    (directory.samples / "step_2.parquet").write_bytes(b"PAR1 and then nothing")
    assert "Samples trained at step 1" in checked(write_report(directory.path, pngs=False))


def test_the_closing_screen_has_the_numbers_the_files_and_what_to_try_next(tmp_path: Path) -> None:
    directory = make_run(tmp_path, 5)
    console = Console(record=True, width=120)
    config = load_config(["recipe=arithmetic"])
    print_summary(directory.path, config, console=console)
    text = console.export_text()
    assert "50.0% → 90.0%" in text
    assert "report.html" in text
    for command, _ in next_steps(config, directory):
        assert command in text


def test_every_command_that_is_recommended_composes(tmp_path: Path) -> None:
    directory = make_run(tmp_path, 1)
    for command, _ in next_steps(load_config(["recipe=arithmetic"]), directory):
        _, _, *words = command.split()
        load_config(words)


def test_a_plot_that_cannot_be_written_is_not_there_by_half(tmp_path: Path) -> None:
    directory = make_run(tmp_path, 5)
    columns = Columns(directory.metrics_file)
    columns.update()
    with files_up_to(9_000), pytest.raises(OSError, match="File too large"):
        write_pngs(charts_of(columns.keys), columns, directory.plots)
    assert list(directory.plots.iterdir()) == []


def test_modules_become_a_script_that_names_no_other() -> None:
    text = script(*SCRIPT)
    assert not re.search(r"^\s*(import|export)\b", text, re.MULTILINE)
    assert "class ChartView" in text
    assert "</script" not in text + static("vendor/uPlot.iife.min.js")


def test_no_two_modules_define_the_same_name() -> None:
    names = re.findall(r"^(?:async )?(?:const|let|class|function) (\w+)", script(*SCRIPT), re.MULTILINE)
    assert sorted(names) == sorted(set(names))


def test_modules_that_cannot_be_one_script_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "odd.js").write_text("export default 3;\n")
    monkeypatch.setattr(report, "STATIC", tmp_path)
    with pytest.raises(ValueError, match="export default"):
        script("odd.js")


def with_pictures(directory: RunDirectory, pictures: list[list[bytes]], **columns: list[Any]) -> str:
    """The report of a run whose rows have these pictures."""
    folder = PictureFolder(directory.path / "pictures", 1e9, FailedWrites(lambda kind, error: None))
    directory.write_samples(2, pa.table(columns | {"pictures": pa.array(folder.keep(pictures), pa.list_(pa.string()))}))
    return checked(write_report(directory.path, pngs=False))


def embedded(text: str) -> list[bytes]:
    """The pictures of a page, in the order of their rules."""
    rules = re.findall(r"\.picture-\d+\{[^}]*url\(data:image/\w+;base64,([\w+/=]+)\)\}", text)
    return [base64.b64decode(rule, validate=True) for rule in rules]


def told(text: str) -> str:
    """The text of the table of samples; pictures are `{number}`."""
    table = re.search(r'<table class="samples">.*?</table>', text, flags=re.DOTALL)
    assert table
    marked = re.sub(r'<span class="picture picture-(\d+)".*?></span>', r"{\1}", table[0])
    return re.sub(r"<.*?>", "", marked)


def test_pictures_stand_at_their_places_each_embedded_once(tmp_path: Path) -> None:
    one, other = picture(56, 84, 1), picture(28, 28, 2, "JPEG")
    task = json.dumps({"prompt": "<image> or <image>?"})
    rows = [[one, other], [one, other], [other], [other, one, one]]
    text = with_pictures(make_run(tmp_path, 2), rows, task=[task] * 4)
    assert embedded(text) == [one, other]
    assert told(text).count("{0} or {1}?") == 2
    assert "{1} or &lt;image&gt;?" in told(text)
    assert "{1}{0} or {0}?" in told(text)  # the first was in an earlier message
    assert re.findall(r'<tr class="(first)?">', text) == ["first", "", "first", "first"]  # pictures tell prompts apart
    assert f'title="[picture 84x56, {len(one) / 1000:.1f} kB]"' in text


def test_pictures_of_a_conversation_stand_at_their_places(tmp_path: Path) -> None:
    said = [
        {"role": "user", "content": [{"type": "text", "text": "Move <b>"}, {"type": "image", "picture": 1}]},
        {"role": "assistant", "content": "right", "policy": "solver"},
        {"role": "tool", "content": [{"type": "image", "picture": 0}, {"type": "image", "picture": 7}, 3]},
    ]
    seen = [[picture(28, 28, 1), picture(28, 28, 2)]]
    text = told(with_pictures(make_run(tmp_path, 2), seen, transcript=[json.dumps(said)]))
    assert "Move &lt;b&gt;{0}" in text
    assert "assistant solver right" in text
    assert "{1}[picture, which was not kept]3" in text


def test_large_pictures_are_embedded_small(tmp_path: Path) -> None:
    large = picture(900, 1200)
    (small,) = embedded(with_pictures(make_run(tmp_path, 2), [[large]], task=["{}"]))
    assert Image.open(io.BytesIO(small)).size == (400, 300)
    assert len(small) < len(large) / 10


def test_pictures_that_are_too_much_are_told_in_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = picture(56, 84, 1), picture(56, 56, 2)
    monkeypatch.setattr(report, "IN_ALL", len(one) + 1)
    task = json.dumps({"prompt": "<image>!"})
    text = with_pictures(make_run(tmp_path, 2), [[one], [other], [b"\x89PNG and no more"]], task=[task] * 3)
    assert embedded(text) == [one]
    assert f"[picture 56x56, {len(other) / 1000:.1f} kB]!" in told(text)
    assert "[picture, which cannot be read]!" in told(text)


def test_a_mark_in_a_prompt_of_text_stays_a_text(tmp_path: Path) -> None:
    directory = make_run(tmp_path, 2)
    directory.write_samples(2, Rows.from_lists({"task": [json.dumps({"prompt": "<image>?"})], "reward": [1.0]}))
    assert "&lt;image&gt;?" in told(checked(write_report(directory.path, pngs=False)))

"""The display says what goes on, in a terminal and in a file."""

import io
from pathlib import Path

from rich.console import Console

from penstock.orchestrator.configuration.compose import load_config
from penstock.orchestrator.recording.losses import Losses
from penstock.orchestrator.reporting.progress import Progress, plain_line, sparkline
from tests.small_files import files_up_to


def shown(*, terminal: bool, words: tuple[str, ...] = ()) -> str:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=terminal, width=100)
    progress = Progress(load_config(["trainer.max_steps=4", *words]), "a run", console=console)
    progress.phase("starting vLLM (about 20 s)")
    for step in range(1, 5):
        progress.step(
            step, {"reward/mean": step / 4, "timing_s/step": 1.0, "staleness/max": 0.0, "dropped/reward_error": 2.0}
        )
    progress.note("held-out accuracy 90%")
    progress.close()
    progress.close()
    return stream.getvalue()


def test_a_file_gets_one_line_a_step_and_no_control_characters() -> None:
    lines = shown(terminal=False).splitlines()
    assert [line for line in lines if line.startswith("step")] == [
        f"step {step}/4  reward {step / 4:.3f}  staleness 0  s 1.00  dropped(reward_error) 2" for step in range(1, 5)
    ]
    assert any("starting vLLM" in line for line in lines)
    assert not any("\x1b" in line for line in lines)


def test_a_terminal_shows_bar_curve_and_notes() -> None:
    text = shown(terminal=True)
    for part in ("step 4/4", "▁", "0.250 → 1.000", "held-out accuracy 90%", "reward_error 2"):
        assert part in text


def test_the_live_display_can_be_switched_off() -> None:
    assert "\x1b[2K" not in shown(terminal=True, words=("tracking.progress=false",))


def test_odd_numbers_do_not_stop_the_display() -> None:
    progress = Progress(load_config([]), "odd", console=Console(file=io.StringIO(), force_terminal=True))
    progress.step(1, {"reward/mean": float("nan"), "timing_s/step": None, "actor/loss": float("inf")})
    progress.close()
    assert plain_line(1, 2, {"reward/mean": float("nan"), "timing_s/step": None}) == "step 1/2"


def test_a_sparkline_spans_its_values_and_averages_long_ones() -> None:
    assert sparkline([]) == ""
    assert sparkline([0.0, 1.0]) == "▁█"
    assert len(sparkline([float(value) for value in range(1000)], width=32)) == 32
    assert sparkline([3.0, 3.0]) == "▁▁"


def test_an_output_that_cannot_be_written_is_counted_and_written_again_later(tmp_path: Path) -> None:
    """Standard output may be a file on the disk that is full."""
    losses = Losses(lambda kind, error: None)
    with (tmp_path / "log").open("w") as file:
        progress = Progress(load_config([]), "a run", console=Console(file=file), losses=losses)
        losses.tell_to(progress.note)
        progress.step(1, {})
        for step in range(2, 1002):
            with files_up_to(100):
                progress.step(step, {})
        progress.step(1002, {})
        progress.close()
    lines = (tmp_path / "log").read_text().splitlines()
    steps = [int(line.split()[1].partition("/")[0]) for line in lines if line.startswith("step")]
    assert steps == sorted(set(steps))
    assert (steps[0], steps[-1]) == (1, 1002)
    assert losses.lost["output"] > 900
    assert lines[-1].endswith("output: can be written again")


def test_a_note_after_the_live_display_has_closed_is_seen() -> None:
    stream = io.StringIO()
    progress = Progress(load_config([]), "a run", console=Console(file=stream, force_terminal=True))
    progress.close()
    progress.note("report: cannot be written")
    assert stream.getvalue().endswith("report: cannot be written\n")

"""The display says what goes on, in a terminal and in a file."""

import io
from pathlib import Path

from rich.console import Console

from penstock.orchestrator.configuration.compose import load_config
from penstock.orchestrator.observability.reporting.progress import ProgressDisplay, plain_line
from penstock.orchestrator.run_directory.failed_writes import FailedWrites
from tests.small_files import files_up_to


def shown(*, terminal: bool, words: tuple[str, ...] = ()) -> str:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=terminal, width=100)
    progress = ProgressDisplay(load_config(["trainer.max_steps=4", *words]), "a run", console=console)
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
    assert [line.partition("  ETA")[0] for line in lines if line.startswith("step")] == [
        f"step {step}/4  reward {step / 4:.3f}  staleness 0  s 1.00  dropped(reward_error) 2" for step in range(1, 5)
    ]
    assert any("starting vLLM" in line for line in lines)
    assert not any("\x1b" in line for line in lines)


def test_the_line_of_a_step_has_the_reward_of_each_policy() -> None:
    metrics: dict[str, float] = {"reward/mean": 0.25, "response_length/mean": 8.0}
    for name, reward in (("solver", 1.0), ("proposer", -0.5)):
        metrics |= {f"{name}/reward/mean": reward, f"{name}/response_length/mean": 8.0}
    line = "step 1/4  reward 0.250  solver 1.000  proposer -0.500  length 8.0"
    assert plain_line(1, 4, metrics) == line
    stream = io.StringIO()
    progress = ProgressDisplay(load_config([]), "two", console=Console(file=stream, force_terminal=True, width=100))
    for step in (1, 2):
        progress.step(step, {**metrics, "proposer/reward/mean": step - 1.5})
    progress.close()
    assert "-0.500 → 0.500" in stream.getvalue()


def test_a_terminal_shows_bar_curve_and_notes() -> None:
    text = shown(terminal=True)
    for part in ("step 4/4", "▁", "0.250 → 1.000", "held-out accuracy 90%", "reward_error 2"):
        assert part in text


def test_the_live_display_can_be_switched_off() -> None:
    assert "\x1b[2K" not in shown(terminal=True, words=("tracking.progress=false",))


def test_odd_numbers_do_not_stop_the_display() -> None:
    progress = ProgressDisplay(load_config([]), "odd", console=Console(file=io.StringIO(), force_terminal=True))
    progress.step(1, {"reward/mean": float("nan"), "timing_s/step": None, "actor/loss": float("inf")})
    progress.close()


def test_an_output_that_cannot_be_written_is_counted_and_written_again_later(tmp_path: Path) -> None:
    """Standard output may be a file on the disk that is full."""
    failed_writes = FailedWrites(lambda kind, error: None)
    with (tmp_path / "log").open("w") as file:
        progress = ProgressDisplay(load_config([]), "a run", console=Console(file=file), failed_writes=failed_writes)
        failed_writes.set_printer(progress.note)
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
    assert failed_writes.lost["output"] > 900
    assert lines[-1].endswith("output: can be written again")


def test_the_newest_warning_stays_on_the_screen_with_what_to_do() -> None:
    stream = io.StringIO()
    progress = ProgressDisplay(load_config([]), "a run", console=Console(file=stream, force_terminal=True, width=80))
    progress.warn("warning", "step 3: all samples had the same reward", "Read some of them.")
    progress.warn("hint", "engines wait 80% of a step", "Use fewer engines.")
    for number in range(20):
        progress.note(f"note {number}")
    progress.close()
    last = stream.getvalue().rpartition("a run")[2]
    assert all(part in last for part in ("hint", "engines wait 80% of a step", "Use fewer engines."))
    assert "the same reward" not in last


def test_a_warning_is_a_line_of_a_log() -> None:
    stream = io.StringIO()
    progress = ProgressDisplay(load_config([]), "a run", console=Console(file=stream))
    progress.warn("warning", "step 3: it does not learn", "Read some samples")
    progress.close()
    assert stream.getvalue().endswith("0:00  warning: step 3: it does not learn. Read some samples\n")


def test_it_fits_on_a_small_terminal() -> None:
    """24 lines of 80 characters."""
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=80, height=24)
    progress = ProgressDisplay(load_config(["trainer.max_steps=100"]), "a run", console=console)
    phases = ("rollout", "reward", "reference", "train", "keep", "partner", "publish", "checkpoint", "evaluation")
    numbers = {"reward/mean": 0.123456, "accuracy/heldout": 0.5, "perf/tokens_per_s": 1234567.8, "idle/rollout": 0.9}
    for step in range(1, 9):
        progress.step(step, numbers | {f"timing_s/{phase}": 123.4 for phase in phases} | {"dropped/reward_error": 2.0})
        progress.note("a note that is far too long for one line of a terminal of eighty characters, as notes often are")
    progress.warn(
        "warning", "all samples of the window had the same reward, so there is nothing to learn from", "x" * 99
    )
    plain = Console(file=io.StringIO(), width=80, record=True)
    plain.print(progress.render())
    progress.close()
    lines = plain.export_text().rstrip().splitlines()
    assert len(lines) <= 23
    assert max(map(len, lines)) <= 80


def test_a_note_after_the_live_display_has_closed_is_seen() -> None:
    stream = io.StringIO()
    progress = ProgressDisplay(load_config([]), "a run", console=Console(file=stream, force_terminal=True))
    progress.close()
    progress.note("report: cannot be written")
    assert stream.getvalue().endswith("report: cannot be written\n")

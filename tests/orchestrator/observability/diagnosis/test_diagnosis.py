"""What is found is told once, as an event and a line, and again when it comes back."""

from pathlib import Path

from rich.console import Console

from penstock.conf.diagnosis import DiagnosisConfig
from penstock.orchestrator.configuration.compose import load_config
from penstock.orchestrator.observability.diagnosis.diagnosis import Diagnosis
from penstock.orchestrator.observability.reporting.progress import Progress
from penstock.orchestrator.run_directory.run_directory import RunDirectory


def test_a_finding_is_told_once_and_again_when_it_comes_back(tmp_path: Path) -> None:
    config = load_config([f"output_dir={tmp_path}", "recipe=arithmetic", "name=demo"])
    directory, progress = RunDirectory.create(config), Progress(config, "demo", console=Console(quiet=True))
    diagnosis = Diagnosis(DiagnosisConfig(window=5), 0, directory, progress)
    for step in range(1, 61):
        is_cut = step <= 20 or step > 40
        diagnosis.look(step, {"step": step, "response_length/clip_ratio": 1.0 if is_cut else 0.0})
    progress.close()
    directory.close()
    events = [event for event in directory.read_events() if event["kind"] == "warning"]
    assert [(event["rule"], event["step"]) for event in events] == [("cut_off", 5), ("cut_off", 43)]
    assert "max_tokens" in events[0]["advice"]
    assert len([text for text in progress.warnings if text.startswith("warning: ")]) == 2


def test_it_can_be_switched_off(tmp_path: Path) -> None:
    config = load_config([f"output_dir={tmp_path}", "recipe=arithmetic", "name=demo"])
    directory, progress = RunDirectory.create(config), Progress(config, "demo", console=Console(quiet=True))
    diagnosis = Diagnosis(DiagnosisConfig(enabled=False, window=2), 0, directory, progress)
    for step in range(5):
        assert not diagnosis.look(step, {"step": step, "response_length/clip_ratio": 1.0})
    directory.close()
    progress.close()

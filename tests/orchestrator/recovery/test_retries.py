"""`penstock run --retries N`: the command is taken up again when it is killed, and not where that is of no use. Real
commands are killed in `tests/chaos`."""

import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.orchestrator.configuration.compose import load_config
from penstock.orchestrator.recovery import retries
from penstock.orchestrator.recovery.retries import run_with_retries
from penstock.orchestrator.run_directory.run_directory import RunDirectory


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., list[list[str]]]:
    """What each try was told, where they end with these codes."""

    def go(codes: list[int], may_help: bool) -> list[list[str]]:
        words: list[list[str]] = []

        def ended(told: list[str]) -> tuple[int, bool]:
            words.append(list(told))
            return codes[len(words) - 1], False

        monkeypatch.setattr(retries, "run_once", ended)
        monkeypatch.setattr(retries, "may_help", lambda config, code: may_help)
        monkeypatch.setattr(retries.time, "sleep", lambda _: None)
        code = run_with_retries(["recipe=arithmetic", f"output_dir={tmp_path}", "resume=never"], 2)
        assert code == codes[len(words) - 1]
        return words

    return go


def test_tries_are_of_one_run_and_later_ones_go_on(tried: Callable[..., list[list[str]]]) -> None:
    first, second, third = tried([-9, 1, 0], True)
    assert first[2] == "resume=never"
    assert second[-1] == third[-1] == "resume=auto"
    names = {word for words in (first, second, third) for word in words if word.startswith("name=")}
    assert len(names) == 1


def test_there_are_no_more_than_were_asked_for(tried: Callable[..., list[list[str]]]) -> None:
    assert len(tried([1, 1, 1, 1], True)) == 3


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_one_that_is_told_to_end_before_it_can_hear_it_is_not_tried_again(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It dies of the signal, as of an accident."""
    started: list[list[str]] = []

    class Deaf:
        """A command that is still importing; a terminal sends Ctrl-C to both."""

        def __init__(self, words: list[str]) -> None:
            started.append(words)
            self.code = 0

        def send_signal(self, sent: int) -> None:
            self.code = -sent

        def wait(self) -> int:
            signal.raise_signal(number)
            return self.code or -number

    monkeypatch.setattr(retries.subprocess, "Popen", Deaf)
    before = signal.getsignal(number)
    assert run_with_retries(["recipe=arithmetic", f"output_dir={tmp_path}"], 2) == -number
    assert len(started) == 1
    assert signal.getsignal(number) is before


def test_what_would_come_again_is_told_once(tried: Callable[..., list[list[str]]]) -> None:
    assert len(tried([2, 0], False)) == 1


@pytest.mark.parametrize("output_dir", ["{}", "file://{}/bucket"])
def test_what_the_run_itself_says_may_help_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, output_dir: str
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    config = load_config([f"output_dir={output_dir.format(tmp_path)}", "name=run"])
    assert not retries.may_help(config, 1)
    directory = RunDirectory.create(config)
    for may_recover in (True, False):
        directory.event("failed", may_recover=may_recover)
        assert retries.may_help(config, 1) == may_recover
    directory.close()

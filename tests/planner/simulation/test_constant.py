"""Durations that a file says, and the command that plays a run with them."""

from pathlib import Path

import pytest
import yaml

from penstock.cli.main import main
from penstock.conf.errors import ConfigError
from penstock.planner.durations import ConstantDurations

SAID = {
    "prefill_tokens_per_s": 40000, "decode": {1: 0.01, 32: 0.02, 64: 0.04}, "update_tokens_per_s": 12000,
    "sync": {"published_s": 2.0, "paused_s": 0.4, "critical_s": 0.5}, "stages": {"reward": 0.001}, "turn_s": 1.5,
}  # fmt: skip


def written(tmp_path: Path, values: object) -> Path:
    file = tmp_path / "durations.yaml"
    file.write_text(yaml.safe_dump(values))
    return file


def test_a_file_says_every_duration(tmp_path: Path) -> None:
    found = ConstantDurations.read(written(tmp_path, SAID))
    assert found.prefill_s(20000) == 0.5
    assert [found.decode_s(count, 100.0) for count in (1, 48, 96)] == pytest.approx([0.01, 0.03, 0.06])
    assert found.update_s([[4000, 2000], [9000]]) == 0.75
    assert (found.stage_s("reward", 8, 100), found.stage_s("reference", 8, 100)) == (0.008, 0.0)
    assert (found.sync().critical_s, found.turn_s()) == (0.5, 1.5)


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"decod": {1: 0.1}}, "decod: unknown"), ({"decode": {}}, "must be above 0"), (3, "unknown"),
        ({"decode": {"one": 0.1}}, "invalid literal"), ({"sync": {"published": 1}}, "unexpected keyword"),
        ({"update_tokens_per_s": -1}, "must be above 0"),
    ],
)  # fmt: skip
def test_what_is_wrong_in_a_file_is_named(tmp_path: Path, wrong: object, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        ConstantDurations.read(written(tmp_path, wrong))


RUN = ["recipe=arithmetic", "name=played", "trainer.groups_per_step=4", "max_staleness=1"]


def test_the_command_prints_the_outcome_and_leaves_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = str(written(tmp_path, SAID))
    asked = ["--steps", "4", "--durations", file, "--lengths", "100:0.5", "--directory", str(tmp_path), "--join", "1:1"]
    assert main(["simulate", *RUN, *asked]) == 0
    out = capsys.readouterr().out
    for word in ("4 steps by 1 engines, 1 ranks, max_staleness=1", "seconds a step", "decoding", "staleness"):
        assert word in out
    assert (tmp_path / "played" / "spans.jsonl").is_file()
    recorded = ["--durations", file, "--from", str(tmp_path / "played"), "--steps", "2"]
    assert main(["simulate", *RUN[:1], "max_staleness=0", *recorded]) == 0
    assert "2 steps by 1 engines, 1 ranks, max_staleness=0" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ([], "nothing says how long things take"), (["--durations", "none.yaml"], "cannot be read"),
        (["--cluster", "1x8:h100", "--durations", "x"], "or two say so"),
        (["--durations", "FILE", "--faults", "often"], "write hours"),
        (["--durations", "FILE", "--join", "4"], "--join"),
        (["--durations", "FILE", "--dropped", "1"], "must leave something"),
        (["--durations", "FILE", "--steps", "-1"], "at least 1"), (["--durations", "FILE", "--lengths", "x"], "mean"),
    ],
)  # fmt: skip
def test_what_cannot_be_simulated_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], asked: list[str], told: str
) -> None:
    file = str(written(tmp_path, SAID))
    assert main(["simulate", *RUN, *(file if word == "FILE" else word for word in asked)]) == 2
    assert told in capsys.readouterr().err

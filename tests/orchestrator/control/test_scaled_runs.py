"""A real run whose engines and rewards come and go, as `penstock scale` has them: it ends with the weights of a run
with one of each throughout, bit for bit."""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.conf.errors import CannotScale
from penstock.orchestrator.configuration.compose import load_config
from penstock.orchestrator.control.scaling_requests import ask
from penstock.orchestrator.run import run
from penstock.orchestrator.run_directory.run_directory import RunDirectory
from tests.model_files import load_model
from tests.run_files import metrics_of

pytestmark = pytest.mark.real

STEPS = 12
REWARD = '''
import os, time


def digits(response, task, slow_while):
    """Slow enough for a run to be changed in between, while that file is there."""
    if os.path.exists(slow_while):
        time.sleep(0.1)
    return sum(character in "0123456789" for character in response) / len(response) if response else 0.0
'''


class Scaling(threading.Thread):
    """Two more engines and one more reward after the first step, all of them gone two steps later."""

    def __init__(self, directory: Path, slow_while: Path) -> None:
        super().__init__(daemon=True)
        self._directory, self._slow_while = directory, slow_while
        self.answers: list[Any] = []
        self.refused = ""

    def run(self) -> None:
        try:
            self._after_step(1)
            self.answers.append(ask(str(self._directory), ["rollout=+2", "reward=2"]))
            self._after_step(self._last_step() + 2)
            self._wait_until(self._all_have_sampled)
            self.answers.append(ask(str(self._directory), ["rollout=1", "reward=-1"], drain_s=30.0))
            ask(str(self._directory), ["rollout=-1"])
        except CannotScale as error:
            self.refused = str(error)
        finally:
            self._slow_while.unlink()

    def _after_step(self, step: int) -> None:
        self._wait_until(lambda: self._last_step() >= step)

    def _wait_until(self, holds: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 300
        while not holds() and time.monotonic() < deadline:
            time.sleep(0.05)

    def _all_have_sampled(self) -> bool:
        """Return whether each engine has sampled a group, or the run is about to end."""
        last = RunDirectory.open(self._directory).read_metrics()[-1]
        counts = [last.get(f"rollout/groups/Rollout-{number}", 0) for number in range(3)]
        return min(counts) > 0 or last["step"] >= STEPS - 2

    def _last_step(self) -> int:
        metrics = self._directory / "metrics.jsonl"
        return metrics.read_bytes().count(b"\n") if metrics.exists() else 0


@pytest.mark.promise("4 scaled", "More machines arrive")
def test_one_engine_then_three_then_one_changes_no_bit(small_run: list[str], cluster: str, tmp_path: Path) -> None:
    reward, slow_while = tmp_path / "slow.py", tmp_path / "slow"
    reward.write_text(REWARD)
    words = [
        *small_run, "rollout.num_threads=1", "trainer.num_threads=1", "rollout.engine=hf", f"trainer.max_steps={STEPS}",
        f"reward.function={reward}:digits", f"reward.options={{slow_while: {slow_while}}}", f"output_dir={tmp_path}",
    ]  # fmt: skip
    alone = run(load_config([*words, "name=alone"]), quiet=True).directory
    slow_while.touch()
    scaling = Scaling(tmp_path / "scaled", slow_while)
    scaling.start()
    scaled = run(load_config([*words, "name=scaled"]), quiet=True).directory
    scaling.join(10)
    (grown, problems), (shrunk, _) = scaling.answers
    assert not problems
    assert [line.partition(" (")[0] for line in grown] == ["rollout: 1 -> 3", "reward: 1 -> 2"]
    assert "Rollout-1 on " in grown[0]
    assert "Rollout-2 on " in grown[0]
    assert shrunk == [
        "rollout: 3 -> 1 (Rollout-2 has left, Rollout-1 has left)", "reward: 2 -> 1 (Reward-1 has left)",
    ]  # fmt: skip
    assert "one has to stay" in scaling.refused

    lines, events = metrics_of(scaled), RunDirectory.open(scaled).read_events()
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    engines = [line["rollout/num_engines"] for line in lines]
    assert engines[0] == 1
    assert 3 in engines
    assert min(lines[-1][f"rollout/groups/Rollout-{number}"] for number in range(3)) > 0
    assert lines[-1]["store/rows_trained"] == STEPS * 16
    for kind in ("joined", "left"):
        members = {event["member"] for event in events if event["kind"] == kind}
        assert members == {"Rollout-1", "Rollout-2", "Reward-1"}
    assert not {"fault", "join_failed"} & {event["kind"] for event in events}
    expected, found = load_model(alone / "model"), load_model(scaled / "model")
    assert expected.keys() == found.keys()
    assert all(expected[name].equal(found[name]) for name in expected)
    with pytest.raises(CannotScale, match="the run is over"):
        ask(str(scaled), ["rollout=+1"])

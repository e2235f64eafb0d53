"""trackio's own package writes what a run says into its database, and reads it back."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.real

PROGRAM = """
import json, sys
from pathlib import Path
from penstock.conf.tracking import TrackioConfig
from penstock.orchestrator.observability.reporting.trackers import About, End
from penstock.orchestrator.observability.reporting.trackers import Trackio

place = Path(sys.argv[1])
told = About("run", "group", None, {"recipe": "none"}, {"seed": 1}, place)
ids = []
ends = [End("failed", "DataError: no rows"), End("finished", "", {"Reward": "0.5"})]
for steps, end in zip((range(3), range(3, 5)), ends):
    tracker = Trackio(TrackioConfig(directory=str(place / "numbers")))
    ids.append(tracker.open(told, ids[-1] if ids else None).id)
    for step in steps:
        tracker.log(step, {"loss": step / 4})
    tracker.finish(end)

import trackio
from trackio.sqlite_storage import SQLiteStorage

(run,) = trackio.Api().runs("penstock")
logs = SQLiteStorage.get_logs("penstock", "run")
found = {
    "ids": [*ids, run.id],
    "config": run.config,
    "loss": [(line["step"], line["loss"]) for line in logs if "loss" in line],
    "ends": [line["end"]["_value"] for line in logs if "end" in line],
    "alerts": [(alert["level"], alert["text"]) for alert in run.alerts()],
}
(place / "found.json").write_text(json.dumps(found))
"""


def test_a_run_and_what_goes_on_with_it_are_one_run(tmp_path: Path) -> None:
    """The run has a process of its own, because trackio reads where its database is as it is imported."""
    ours = {"HOME": str(tmp_path), "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1", "PYTHONPATH": os.getcwd()}
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("TRACKIO_", "HF_"))} | ours
    subprocess.run([sys.executable, "-c", PROGRAM, str(tmp_path)], check=True, timeout=900, env=environment)
    found = json.loads((tmp_path / "found.json").read_text())
    assert len(set(found["ids"])) == 1
    assert found["loss"] == [[0, 0.0], [1, 0.25], [2, 0.5], [3, 0.75], [4, 1.0]]
    assert (found["config"]["seed"], found["config"]["_Group"]) == (1, "group")
    assert found["config"]["tags"] == {"recipe": "none"}
    assert found["ends"] == [
        "- **state**: failed\n- **error**: DataError: no rows",
        "- **state**: finished\n- **summary/Reward**: 0.5",
    ]
    assert found["alerts"] == [["error", "DataError: no rows"]]

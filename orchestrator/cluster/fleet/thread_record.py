"""`threads.json` in a run's directory: numbers of threads of engines and ranks, and what was measured to find them. A
process that goes on with the run keeps what is there.

    [{"cpu": "AMD EPYC", "cores": 2, "engines": 1, "ranks": 1, "threads": {"rollout": 1, "trainer": 2},
      "s_per_token": {"rollout": {"1": 1.4e-4, "2": 1.6e-4}, "trainer": {"1": 2.9e-4, "2": 1.7e-4}}}]
"""

import json
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from penstock.orchestrator.cluster.placement.threads import SharedNode, Threads
from penstock.orchestrator.run_directory.run_directory import RunDirectory
from penstock.workers.cpu import cpu_entry

FILE = "threads.json"


@dataclass(frozen=True)
class Trial:
    """The numbers of threads chosen on one node, and why: seconds a token on one engine and one rank alone, by
    threads."""

    threads: Threads
    engine_s: Mapping[int, float]
    rank_s: Mapping[int, float]


def write_trials(directory: RunDirectory, trials: Mapping[SharedNode, Trial]) -> None:
    lines = [_line_of(node, trial) for node, trial in trials.items()]
    with directory.losses.tolerating(FILE, "A run that goes on finds the numbers of threads anew."):
        directory.write_text(FILE, json.dumps(lines, indent=1) + "\n")


def read_trials(directory: RunDirectory) -> dict[SharedNode, Trial]:
    """Read the trials; empty where there are none that can be read, or they are of another CPU."""
    try:
        lines = json.loads((directory.path / FILE).read_text(encoding="utf-8"))
        return dict(_trial_of(line) for line in lines if line["cpu"] == cpu_name())
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def cpu_name() -> str:
    """Name of the driver's CPU; those of the other nodes are assumed to be the same."""
    return cpu_entry("model name") or platform.processor()


def _line_of(node: SharedNode, trial: Trial) -> dict[str, Any]:
    measured = {"rollout": trial.engine_s, "trainer": trial.rank_s}
    return {"cpu": cpu_name(), **node._asdict(), "threads": trial.threads._asdict(), "s_per_token": measured}


def _trial_of(line: Mapping[str, Any]) -> tuple[SharedNode, Trial]:
    engine_s, rank_s = ({int(n): s for n, s in line["s_per_token"][role].items()} for role in ("rollout", "trainer"))
    return SharedNode(*(line[name] for name in SharedNode._fields)), Trial(Threads(**line["threads"]), engine_s, rank_s)

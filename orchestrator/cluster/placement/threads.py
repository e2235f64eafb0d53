"""Numbers of CPU threads of engines and ranks, from the cores of the node that each is on.

max_staleness=0     they take turns: each side divides all cores among its own kind
otherwise           they run at the same time: as `best` finds by what `try_threads` has measured there;
                    before that, and where nothing is measured, an even share each
turns chosen        (`control/turns.py`) the numbers with which each side was fastest alone

What was found and measured is kept in `threads.json` in the run's directory, for a command that resumes the run:

    [{"cpu": "AMD EPYC", "cores": 2, "engines": 1, "ranks": 1, "threads": {"rollout": 1, "trainer": 2},
      "s_per_token": {"rollout": {"1": 1.4e-4, "2": 1.6e-4}, "trainer": {"1": 2.9e-4, "2": 1.7e-4}}}]
"""

import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

from penstock.conf.run import RunConfig
from penstock.orchestrator.cluster.placement.actors import ActorPlan
from penstock.orchestrator.cluster.placement.assignment import Assignment
from penstock.orchestrator.run_directory.run_directory import RunDirectory
from penstock.workers.runtime.processes import cpu_entry

NEARLY = 1.05
"""Factor of time by which trials of the same number of threads differ. Within it, fewer threads are taken where engines
and ranks work at the same time, more where they take turns."""
FILE = "threads.json"


class SharedNode(NamedTuple):
    """Engines and ranks of the trainer that share a node's cores."""

    cores: int
    engines: int
    ranks: int


class Threads(NamedTuple):
    """Numbers of CPU threads of each engine, and of each rank."""

    rollout: int
    trainer: int


@dataclass(frozen=True)
class Trial:
    """The numbers of threads chosen on one node, and why: seconds a token on one engine and one rank alone, by
    threads."""

    threads: Threads
    engine_s: Mapping[int, float]
    rank_s: Mapping[int, float]

    def alone(self, node: SharedNode) -> Threads:
        """The numbers of threads with which each side is fastest while the other one waits: as many as in a synchronous
        run, unless fewer were clearly faster. One engine was measured, and all ranks together: more threads of engines
        than cores share these."""
        crowds = {count: max(1.0, count * node.engines / node.cores) for count in self.engine_s}
        engine_s = {count: seconds * crowds[count] for count, seconds in self.engine_s.items()}
        return Threads(_most(engine_s), _most(self.rank_s))


Chosen = Mapping[SharedNode, Threads]


def threads_of(
    actor: ActorPlan,
    actors: Sequence[ActorPlan],
    assignment: Assignment,
    cores: Mapping[str, int],
    config: RunConfig,
    chosen: Chosen,
) -> int:
    """Number of CPU threads of an actor. `cores`: those that processes may use, by node id. The ranks that count are
    those of the actor's stage, on its node."""
    node = assignment.node_of[actor.name]
    here = [other for other in actors if assignment.node_of[other.name].id == node.id]
    engines = sum(other.role == "rollout" for other in here)
    role, stage = (actor.role, actor.stage) if actor.role == "scorer" else ("trainer", "train")
    ranks = sum(other.role == role and other.stage == stage for other in here)
    found = chosen.get(SharedNode(cores[node.id], engines, ranks)) if actor.role in ("rollout", "trainer") else None
    if found is not None and not _given(actor.role, config):
        return found.rollout if actor.role == "rollout" else found.trainer
    return threads_per_worker(actor.role, config, cores[node.id], engines, ranks)


def threads_per_worker(role: str, config: RunConfig, num_cores: int, num_engines: int, num_ranks: int) -> int:
    """CPU threads of an engine (`rollout`) or rank (`trainer`, `scorer`) on a node with so many of them, by
    division."""
    workers = num_engines if role == "rollout" else num_ranks
    if config.max_staleness > 0:
        workers = num_engines + num_ranks
    return _given(role, config) or max(1, num_cores // workers)


def _given(role: str, config: RunConfig) -> int:
    """The number that the configuration names; 0 for none."""
    return config.rollout.num_threads if role == "rollout" else config.trainer.num_threads


def are_tried(config: RunConfig) -> bool:
    """Return whether numbers of threads are tried: engines and ranks compute on the same CPUs at the same time, and a
    number of theirs is not given."""
    on_gpus = config.rollout.num_gpus_per_worker or config.trainer.num_gpus_per_rank
    given = config.rollout.num_threads and config.trainer.num_threads
    return config.max_staleness > 0 and config.rollout.capabilities.changes_threads and not on_gpus and not given


def shared_nodes(
    actors: Sequence[ActorPlan], assignment: Assignment, cores: Mapping[str, int]
) -> dict[SharedNode, list[ActorPlan]]:
    """Kinds of nodes that have several cores to share, each with one engine and all ranks of the first node of its
    kind."""
    found: dict[SharedNode, list[ActorPlan]] = {}
    for node, num_cores in cores.items():
        here = [actor for actor in actors if assignment.node_of[actor.name].id == node]
        engines = [actor for actor in here if actor.role == "rollout"]
        ranks = [actor for actor in here if actor.role == "trainer"]
        if engines and ranks and num_cores > 1:
            found.setdefault(SharedNode(num_cores, len(engines), len(ranks)), [engines[0], *ranks])
    return found


def counts_to_try(given: int, num_cores: int) -> list[int]:
    """Numbers of threads to try: 1, 2, 4, … and all cores; only the given number if there is one. `given`: 0 for
    none."""
    if given:
        return [given]
    doubled = [2**power for power in range(num_cores.bit_length()) if 2**power < num_cores]
    return [*doubled, num_cores]


def best(shared: SharedNode, engine_s: Mapping[int, float], rank_s: Mapping[int, float]) -> Threads:
    """The numbers of threads with which a token is through both sides soonest, as they work at the same time.
    `engine_s`, `rank_s`: seconds a token on one engine and one rank alone, by threads.

    More threads than cores slow down both sides alike, until the one with less to do is done; then the other has its
    threads to itself. So a token takes what it takes on the slower side, and longer by what the faster one has lost.
    """

    def seconds(threads: tuple[int, int]) -> float:
        engine, rank = engine_s[threads[0]] / shared.engines, rank_s[threads[1]] / shared.ranks
        threads_per_core = (threads[0] * shared.engines + threads[1] * shared.ranks) / shared.cores
        return max(engine, rank) + min(engine, rank) * max(0.0, threads_per_core - 1)

    pairs = list(product(engine_s, rank_s))
    bound = NEARLY * min(map(seconds, pairs))
    return Threads(
        *min((pair for pair in pairs if seconds(pair) <= bound), key=lambda pair: (sum(pair), seconds(pair)))
    )


def _most(seconds: Mapping[int, float]) -> int:
    bound = NEARLY * min(seconds.values())
    return max(count for count, value in seconds.items() if value <= bound)


def write_trials(directory: RunDirectory, trials: Mapping[SharedNode, Trial]) -> None:
    lines = [_line_of(node, trial) for node, trial in trials.items()]
    with directory.failed_writes.tolerating(FILE, "A run that goes on finds the numbers of threads anew."):
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

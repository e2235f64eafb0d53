"""The table of GPUs: a run of each size of model on each cluster, as its own plan starts it or refuses it."""

import io
import itertools
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console

from penstock.conf.errors import ResourceError
from penstock.orchestrator.cluster.placement.assignment import assign
from penstock.orchestrator.cluster.placement.nodes import Node
from penstock.orchestrator.configuration.compose import load_config
from penstock.orchestrator.configuration.memory_view import ACCELERATOR, gpu_bytes
from penstock.orchestrator.configuration.resolved import resolve
from penstock.orchestrator.configuration.run_memory import RunMemory, choose_auto
from penstock.planner.plan_inputs import model_shapes
from penstock.planner.planned_runs import with_plan

CPUS_PER_GPU = 12
CLUSTERS = ((1, 1), (1, 2), (1, 4), (1, 8), (2, 8), (8, 8))
"""Nodes, and GPUs of each."""
KINDS = {24: "L4", 40: "A100-40G", 80: "A100", 141: "H200"}
"""Ray's names of kinds by their GiB."""
MODELS = {
    "0.5B": "Qwen/Qwen2.5-0.5B", "1.5B": "Qwen/Qwen2.5-1.5B", "7B": "Qwen/Qwen2.5-7B", "32B": "Qwen/Qwen2.5-32B",
    "30B-A3B": "Qwen/Qwen3-30B-A3B",
}  # fmt: skip
WAYS = tuple(itertools.product((0, 32), (0.0, 0.01)))
"""Ranks of LoRA (0: full), with weights of the KL term."""
PLAN = re.compile(r"plan for (\S+): .*, about [\d.]+ s a step .*; .* \(.*\)\n")
FREE = re.compile(r"; (\d+) GPUs stay free: (another engine would gain less than 1%|too few for another engine or)")
REFUSAL = re.compile(r"Nothing fits (\S+)\. One of these would: [^\n]*\.")


@dataclass(frozen=True)
class Outcome:
    """What became of a run."""

    said: str
    """The line of its plan; the refusal of a run that does not start."""
    starts: bool
    free: float = 0.0
    """GPUs that nothing of the run is on."""
    planned_s: float = 0.0
    """Seconds of processor time until the plan was there."""

    def __str__(self) -> str:
        """A cell of the table."""
        if not self.starts:
            return "–"
        way = "together" if ": colocated" in self.said else "apart"
        return f"{way}{', offload' * ('offload' in self.said)}{f', {self.free:g} free' * bool(self.free)}"


def machines_of(cluster: tuple[int, int], label: str) -> list[Node]:
    """Nodes of a cluster, the driver's first."""
    count, gpus = cluster
    labels = {ACCELERATOR: label} if gpus else {}
    return [Node(str(at), f"n{at}", f"10.0.0.{at}", CPUS_PER_GPU * max(1, gpus), gpus, labels) for at in range(count)]


def outcome(nodes: Sequence[Node], *words: str) -> Outcome:
    """What becomes of `recipe=gsm8k` with these words on nodes that `plan_inputs.look` finds. A run that starts has
    room on them, GPU by GPU and GiB by GiB, as it checks before its first actor. Raises `AssertionError` or
    `ResourceError` where that is not so, or where what is said does not say it."""
    began, said = time.process_time(), io.StringIO()
    try:
        planned = planned_words(*words, said=said)
    except ResourceError as error:
        if not REFUSAL.fullmatch(str(error)):
            raise
        return Outcome(str(error), starts=False)
    planned_s, text = time.process_time() - began, said.getvalue()
    assert PLAN.fullmatch(text), text
    run = resolve(load_config(planned))
    assign(run.plan, nodes, run.config)
    known = gpu_bytes(run.config, nodes, run.plan)
    assert known is not None
    choose_auto(RunMemory(run.config, run.flow, model_shapes(run.config, run.flow), known)).check()
    free = sum(node.gpus for node in nodes) - sum(actor.num_gpus for actor in run.plan)
    told = FREE.search(text)
    assert (float(told[1]) if told else 0.0) == round(free, 3), text
    return Outcome(text, starts=True, free=round(free, 3), planned_s=planned_s)


def planned_words(*words: str, said: io.StringIO | None = None) -> list[str]:
    """All words of `recipe=gsm8k` with its plan, whose line is written to `said`."""
    return with_plan(("recipe=gsm8k", *words), Console(file=said or io.StringIO(), width=500))


def words_of(model: str, lora: int, kl: float) -> tuple[str, ...]:
    return f"model.path={MODELS[model]}", f"trainer.lora.rank={lora}", f"algorithm.kl_coef={kl}"


def table_of(found: dict[tuple[tuple[int, int], int, str, int, float], Outcome]) -> str:
    """All outcomes, a line for each model, way and GPU, a column for each cluster."""
    lines = [f"{'model':9}{'way':14}{'GiB':5}" + "".join(f"{f'{nodes}x{gpus}':20}" for nodes, gpus in CLUSTERS)]
    for model, (lora, kl), gib in itertools.product(MODELS, WAYS, KINDS):
        way = f"{'LoRA' if lora else 'full'}{', KL' * bool(kl)}"
        cells = "".join(f"{found[cluster, gib, model, lora, kl]!s:20}" for cluster in CLUSTERS)
        lines.append(f"{model:9}{way:14}{gib:<5}{cells}".rstrip())
    starting = sum(one.starts for one in found.values())
    slowest = max((one.planned_s for (cluster, *_), one in found.items() if cluster[0] == 1), default=0.0)
    lines.append(
        f"{len(found)} runs: {starting} start, of which {sum(one.free > 0 for one in found.values())} leave GPUs free; "
        f"{len(found) - starting} are told what would fit (–). The slowest plan of one node took {slowest:.1f} s."
    )
    return "\n".join(lines)

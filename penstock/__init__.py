"""Penstock: reinforcement learning for language models as a dataflow of columns.

    import penstock

    result = penstock.train(model="tiny", dataset=rows, reward=score, trainer={"max_steps": 20})

`train` is the one call for a notebook, `run` the same with a configuration, `load_config(["recipe=arithmetic"])`.
`run` executes a `Dataflow` (declarative); `session` hands out the actors for a loop of one's own (imperative), and
`Client` an adapter on a server for the same loop.
What is one's own is registered by name: `@algorithm`, `@reward`, `@environment`, `@advantage`, `@surrogate`,
`@correction`.
"""

import importlib
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.algorithms.advantages import advantage as advantage
    from penstock.algorithms.aggregation import BatchTotals as BatchTotals
    from penstock.algorithms.aggregation import aggregate as aggregate
    from penstock.algorithms.corrections import correction as correction
    from penstock.algorithms.corrections import truncated_importance_weight as truncated_importance_weight
    from penstock.algorithms.graph.columns import Column as Column
    from penstock.algorithms.graph.dataflow import Dataflow as Dataflow
    from penstock.algorithms.graph.loss import LossInputs as LossInputs
    from penstock.algorithms.graph.loss import LossOutput as LossOutput
    from penstock.algorithms.graph.stage import Stage as Stage
    from penstock.algorithms.losses import surrogate as surrogate
    from penstock.algorithms.registry import NonNegative as NonNegative
    from penstock.algorithms.registry import Positive as Positive
    from penstock.algorithms.registry import algorithm as algorithm
    from penstock.conf.algorithms import AlgorithmConfig as AlgorithmConfig
    from penstock.conf.errors import AttemptOver as AttemptOver
    from penstock.conf.errors import ConfigError as ConfigError
    from penstock.conf.errors import DataError as DataError
    from penstock.conf.errors import InfrastructureError as InfrastructureError
    from penstock.conf.errors import LimitReached as LimitReached
    from penstock.conf.errors import PenstockError as PenstockError
    from penstock.conf.run import RunConfig as RunConfig
    from penstock.orchestrator.client import Client as Client
    from penstock.orchestrator.configuration.compose import load_config as load_config
    from penstock.orchestrator.run import RunResult as RunResult
    from penstock.orchestrator.run import run as run
    from penstock.orchestrator.session import session as session
    from penstock.orchestrator.train import train as train
    from penstock.store.data.rows import Rows as Rows
    from penstock.workers.agents.environment import Context as Context
    from penstock.workers.agents.environment import Task as Task
    from penstock.workers.agents.environment import environment as environment
    from penstock.workers.agents.gateway.conversation import Message as Message
    from penstock.workers.agents.trajectory import Trajectory as Trajectory
    from penstock.workers.agents.trajectory import Turn as Turn
    from penstock.workers.protocols import AdamParams as AdamParams
    from penstock.workers.protocols import Datum as Datum
    from penstock.workers.protocols import LossCall as LossCall
    from penstock.workers.protocols import Sampling as Sampling
    from penstock.workers.reward.reward_registry import reward as reward
    from penstock.workers.sandbox.sandbox import Sandbox as Sandbox

_MODULES = {
    name: module
    for module, name in re.findall(r"^    from (\S+) import (\w+) as", Path(__file__).read_text(), re.MULTILINE)
}
"""Module of each public name, as the imports above have it."""
__all__ = sorted(_MODULES)
_PLANNED = ("run", "session", "train")
"""What starts actors, and has the planner of `plan=auto`, which is a layer above, choose their places."""


def __getattr__(name: str) -> Any:
    """Import on first use: `import penstock` alone costs milliseconds, not the seconds of torch and Ray."""
    if name not in _MODULES:
        from penstock.conf.renamed import present_name

        present = present_name(name)
        if present is None:
            raise AttributeError(f"module 'penstock' has no attribute {name!r}")
        return __getattr__(present)
    if name in _PLANNED:
        importlib.import_module("penstock.planner.planned_runs")
    return getattr(importlib.import_module(_MODULES[name]), name)

"""Penstock: reinforcement learning for language models as a dataflow of columns.

    import penstock

    config = penstock.load_config(["recipe=arithmetic", "trainer.max_steps=20"])
    result = penstock.run(config)

`run` executes a `Dataflow` (declarative); `session` hands out the actors for a loop of one's own (imperative).
Algorithms and rewards of one's own are registered with `@algorithm("name")` and `@reward("name")`.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.algorithms.graph.columns import Column as Column
    from penstock.algorithms.graph.dataflow import Dataflow as Dataflow
    from penstock.algorithms.graph.stage import Stage as Stage
    from penstock.algorithms.registry import algorithm as algorithm
    from penstock.conf.algorithms.base import AlgorithmConfig as AlgorithmConfig
    from penstock.conf.run import RunConfig as RunConfig
    from penstock.orchestrator.configuration.compose import load_config as load_config
    from penstock.orchestrator.run import run as run
    from penstock.orchestrator.session import session as session
    from penstock.store.data.rows import Rows as Rows
    from penstock.workers.reward.registry import reward as reward

_HOMES = {
    "AlgorithmConfig": "conf.algorithms.base",
    "Column": "algorithms.graph.columns",
    "Dataflow": "algorithms.graph.dataflow",
    "Rows": "store.data.rows",
    "RunConfig": "conf.run",
    "Stage": "algorithms.graph.stage",
    "algorithm": "algorithms.registry",
    "load_config": "orchestrator.configuration.compose",
    "reward": "workers.reward.registry",
    "run": "orchestrator.run",
    "session": "orchestrator.session",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    """Import on first use: `import penstock` alone costs milliseconds, not the seconds of torch and Ray."""
    if name not in _HOMES:
        raise AttributeError(f"module 'penstock' has no attribute {name!r}")
    return getattr(importlib.import_module(f"penstock.{_HOMES[name]}"), name)

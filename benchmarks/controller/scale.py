"""Size of the simulated fleet, and the settings of its run."""

from dataclasses import dataclass

from penstock.algorithms.catalogue import build_dataflow
from penstock.algorithms.graph.dataflow import Dataflow
from penstock.conf.run import RunConfig
from penstock.orchestrator.configuration.compose import load_config

STEP_S = 30.0
"""Seconds of a step, about: engines sample for 10 to 22 s, ranks update for `UPDATE_S`."""
UPDATE_S, PUBLISH_S, LOAD_S = 27.0, 1.0, 2.0
TOKENS, TOKENS_PER_S = (10, 22), 1.0
"""Fewest and most tokens of a response. What tokens weigh is the store's and the engines' business."""


@dataclass(frozen=True)
class Scale:
    num_engines: int = 1024
    num_ranks: int = 64
    num_rewards: int = 16
    group_size: int = 4
    num_steps: int = 100
    speed: float = 15.0
    """Seconds of the run in one of the wall's."""
    devices: int = 8
    """Number of engines, or ranks, of a node."""

    def config(self, output_dir: str) -> RunConfig:
        """Make the configuration. What is not set here is as by default."""
        return load_config(
            (
                f"output_dir={output_dir}",
                "name=run",
                "model=tiny",
                "data.path=prompts.jsonl",
                "rollout.engine=scripted",
                f"rollout.num_workers={self.num_engines}",
                f"rollout.sampling.max_tokens={TOKENS[1]}",
                f"rollout.max_concurrent_samples={8 * self.group_size}",
                f"reward.num_workers={self.num_rewards}",
                "reward.function=digits",
                "reward.cpus_per_worker=0",
                f"trainer.num_ranks={self.num_ranks}",
                f"trainer.groups_per_step={self.num_engines}",
                f"trainer.max_steps={self.num_steps}",
                f"algorithm.group_size={self.group_size}",
                "max_staleness=1",
                "checkpoint.every_steps=0",
                "evaluation.every_steps=0",
                "tracking.export_model=false",
                "cluster.shutdown_timeout_s=7200",  # seconds of a clock that runs many times as fast as this machine
            )
        )


def flow_of(config: RunConfig) -> Dataflow:
    return build_dataflow(config.algorithm)

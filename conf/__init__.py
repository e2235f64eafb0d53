"""The configuration of a run: a dataclass a section, made in Python or of a recipe's words (`penstock.load_config`).

    from penstock import conf, run

    run(conf.RunConfig(model=conf.ModelConfig(path="my_model"), algorithm=conf.GrpoConfig(group_size=16), …))

docs/keys.md has every field. Light to import: a section's module is imported when its name is used.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.conf.algorithms.base import AlgorithmConfig as AlgorithmConfig
    from penstock.conf.algorithms.base import GrpoConfig as GrpoConfig
    from penstock.conf.algorithms.base import SftConfig as SftConfig
    from penstock.conf.algorithms.policy_gradient import CispoConfig as CispoConfig
    from penstock.conf.algorithms.policy_gradient import DapoConfig as DapoConfig
    from penstock.conf.algorithms.policy_gradient import DrGrpoConfig as DrGrpoConfig
    from penstock.conf.algorithms.policy_gradient import GspoConfig as GspoConfig
    from penstock.conf.algorithms.policy_gradient import PolicyGradientConfig as PolicyGradientConfig
    from penstock.conf.algorithms.policy_gradient import PpoConfig as PpoConfig
    from penstock.conf.algorithms.policy_gradient import ReinforcePpConfig as ReinforcePpConfig
    from penstock.conf.algorithms.policy_gradient import RemaxConfig as RemaxConfig
    from penstock.conf.algorithms.policy_gradient import RlooConfig as RlooConfig
    from penstock.conf.algorithms.preference import DistillConfig as DistillConfig
    from penstock.conf.algorithms.preference import DpoConfig as DpoConfig
    from penstock.conf.algorithms.preference import KtoConfig as KtoConfig
    from penstock.conf.algorithms.preference import OnlineDpoConfig as OnlineDpoConfig
    from penstock.conf.algorithms.preference import OnlineKtoConfig as OnlineKtoConfig
    from penstock.conf.algorithms.preference import RewardModelConfig as RewardModelConfig
    from penstock.conf.cluster import ClusterConfig as ClusterConfig
    from penstock.conf.data import ColumnsConfig as ColumnsConfig
    from penstock.conf.data import CurriculumConfig as CurriculumConfig
    from penstock.conf.data import DataConfig as DataConfig
    from penstock.conf.data import EvaluationConfig as EvaluationConfig
    from penstock.conf.data import EvaluationSetConfig as EvaluationSetConfig
    from penstock.conf.data import PartConfig as PartConfig
    from penstock.conf.data import PhaseConfig as PhaseConfig
    from penstock.conf.diagnosis import DiagnosisConfig as DiagnosisConfig
    from penstock.conf.environment import EnvironmentConfig as EnvironmentConfig
    from penstock.conf.environment import GatewayConfig as GatewayConfig
    from penstock.conf.environment import SandboxConfig as SandboxConfig
    from penstock.conf.faults import CheckpointConfig as CheckpointConfig
    from penstock.conf.faults import FaultsConfig as FaultsConfig
    from penstock.conf.model import FreshModelConfig as FreshModelConfig
    from penstock.conf.model import ModelConfig as ModelConfig
    from penstock.conf.reward import JudgeConfig as JudgeConfig
    from penstock.conf.reward import RewardConfig as RewardConfig
    from penstock.conf.reward import WeightedRewardConfig as WeightedRewardConfig
    from penstock.conf.rollout import RolloutConfig as RolloutConfig
    from penstock.conf.rollout import SamplingConfig as SamplingConfig
    from penstock.conf.rollout import ScriptedConfig as ScriptedConfig
    from penstock.conf.run import RunConfig as RunConfig
    from penstock.conf.run import WarmStartConfig as WarmStartConfig
    from penstock.conf.serve import ServeConfig as ServeConfig
    from penstock.conf.serve import TenantConfig as TenantConfig
    from penstock.conf.store import StoreConfig as StoreConfig
    from penstock.conf.tracking import MlflowConfig as MlflowConfig
    from penstock.conf.tracking import TrackingConfig as TrackingConfig
    from penstock.conf.tracking import TrackioConfig as TrackioConfig
    from penstock.conf.tracking import WandbConfig as WandbConfig
    from penstock.conf.trainer import DeepSpeedConfig as DeepSpeedConfig
    from penstock.conf.trainer import LoraConfig as LoraConfig
    from penstock.conf.trainer import OptimizerConfig as OptimizerConfig
    from penstock.conf.trainer import ReplayConfig as ReplayConfig
    from penstock.conf.trainer import TrainerConfig as TrainerConfig
    from penstock.conf.weights import WeightsConfig as WeightsConfig

_MODULES = (
    "algorithms.base", "algorithms.policy_gradient", "algorithms.preference", "cluster", "data", "diagnosis",
    "environment", "faults", "model", "reward", "rollout", "run", "serve", "store", "tracking", "trainer", "weights",
)  # fmt: skip


def __getattr__(name: str) -> Any:
    for module in _MODULES if name.endswith("Config") else ():
        found = vars(importlib.import_module(f"penstock.conf.{module}"))
        if name in found:
            return found[name]
    raise AttributeError(f"module 'penstock.conf' has no attribute {name!r}")

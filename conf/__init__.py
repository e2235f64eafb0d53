"""The configuration of a run: a dataclass a section, made in Python or of a recipe's words (`penstock.load_config`).

    from penstock import conf, run

    run(conf.RunConfig(model=conf.ModelConfig(path="my_model"), algorithm=conf.GrpoConfig(group_size=16), …))

docs/keys.md has every field. Light to import: a section's module is imported when its name is used.
"""

import importlib
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.conf.algorithms import AlgorithmConfig as AlgorithmConfig
    from penstock.conf.algorithms import CispoConfig as CispoConfig
    from penstock.conf.algorithms import DapoConfig as DapoConfig
    from penstock.conf.algorithms import DistillConfig as DistillConfig
    from penstock.conf.algorithms import DpoConfig as DpoConfig
    from penstock.conf.algorithms import DrGrpoConfig as DrGrpoConfig
    from penstock.conf.algorithms import GrpoConfig as GrpoConfig
    from penstock.conf.algorithms import GspoConfig as GspoConfig
    from penstock.conf.algorithms import KtoConfig as KtoConfig
    from penstock.conf.algorithms import OnlineDpoConfig as OnlineDpoConfig
    from penstock.conf.algorithms import OnlineKtoConfig as OnlineKtoConfig
    from penstock.conf.algorithms import PolicyGradientConfig as PolicyGradientConfig
    from penstock.conf.algorithms import PpoConfig as PpoConfig
    from penstock.conf.algorithms import ReinforcePpConfig as ReinforcePpConfig
    from penstock.conf.algorithms import RemaxConfig as RemaxConfig
    from penstock.conf.algorithms import RewardModelConfig as RewardModelConfig
    from penstock.conf.algorithms import RlooConfig as RlooConfig
    from penstock.conf.algorithms import SftConfig as SftConfig
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
    from penstock.conf.rollout import SpeculationConfig as SpeculationConfig
    from penstock.conf.run import RunConfig as RunConfig
    from penstock.conf.run import StoreConfig as StoreConfig
    from penstock.conf.run import WarmStartConfig as WarmStartConfig
    from penstock.conf.serve import ServeConfig as ServeConfig
    from penstock.conf.serve import TenantConfig as TenantConfig
    from penstock.conf.tracking import MlflowConfig as MlflowConfig
    from penstock.conf.tracking import TrackingConfig as TrackingConfig
    from penstock.conf.tracking import TrackioConfig as TrackioConfig
    from penstock.conf.tracking import WandbConfig as WandbConfig
    from penstock.conf.trainer import DeepSpeedConfig as DeepSpeedConfig
    from penstock.conf.trainer import LoraConfig as LoraConfig
    from penstock.conf.trainer import OptimizerConfig as OptimizerConfig
    from penstock.conf.trainer import PolicyConfig as PolicyConfig
    from penstock.conf.trainer import ReplayConfig as ReplayConfig
    from penstock.conf.trainer import TrainerConfig as TrainerConfig
    from penstock.conf.weights import WeightsConfig as WeightsConfig

_MODULES = {
    name: module
    for module, name in re.findall(r"^    from (\S+) import (\w+) as", Path(__file__).read_text(), re.MULTILINE)
}
"""Module of each name, as the imports above have it."""


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'penstock.conf' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)

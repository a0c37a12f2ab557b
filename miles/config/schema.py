"""The run's configuration tree: each field of a section says everything once, type, bound, default, flag, help."""

from __future__ import annotations

from typing import Any

from miles.config.base import ConfigModel
from miles.config.sections.algorithm import AlgorithmConfig, CorrectionConfig, CriticConfig
from miles.config.sections.data import DataConfig, ModelConfig
from miles.config.sections.debug import CiConfig, DebugConfig
from miles.config.sections.evaluation import EvalConfig, EvalDataset
from miles.config.sections.machine import ClusterConfig, FaultToleranceConfig, RunSectionConfig
from miles.config.sections.reward import RewardConfig
from miles.config.sections.rollout import EngineConfig, RolloutConfig, RouterConfig
from miles.config.sections.train import OptimizerConfig, TrainConfig
from miles.config.sections.weights import CheckpointConfig, ParityConfig, WeightsConfig

__all__ = [
    "AlgorithmConfig",
    "CheckpointConfig",
    "CiConfig",
    "ClusterConfig",
    "CorrectionConfig",
    "CriticConfig",
    "DataConfig",
    "DebugConfig",
    "EngineConfig",
    "EvalConfig",
    "EvalDataset",
    "FaultToleranceConfig",
    "ModelConfig",
    "OptimizerConfig",
    "ParityConfig",
    "RewardConfig",
    "RolloutConfig",
    "RouterConfig",
    "RunConfig",
    "RunSectionConfig",
    "TrainConfig",
    "WeightsConfig",
]


class RunConfig(ConfigModel):
    """Every setting of a run."""

    run: RunSectionConfig = RunSectionConfig()
    cluster: ClusterConfig = ClusterConfig()
    fault_tolerance: FaultToleranceConfig = FaultToleranceConfig()
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    rollout: RolloutConfig = RolloutConfig()
    engine: EngineConfig = EngineConfig()
    router: RouterConfig = RouterConfig()
    reward: RewardConfig = RewardConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    critic: CriticConfig = CriticConfig()
    correction: CorrectionConfig = CorrectionConfig()
    train: TrainConfig = TrainConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    weights: WeightsConfig = WeightsConfig()
    parity: ParityConfig = ParityConfig()
    debug: DebugConfig = DebugConfig()
    ci: CiConfig = CiConfig()
    custom: dict[str, Any] = {}
    """Open section for your own functions, read as `args.NAME`; `--custom-config-path FILE.yaml` fills it."""

"""Typed values that cross boundaries."""

from core.contracts.algorithm import AlgorithmName, AlgorithmSettings
from core.contracts.base import Contract
from core.contracts.dataset import DatasetReport, LineFault, TokenStats
from core.contracts.graders import Grader, MultiGrader, StringCheckGrader, TextMetric, TextSimilarityGrader
from core.contracts.job import (
    TERMINAL,
    EventLevel,
    EventType,
    JobSettings,
    JobSpec,
    JobStatus,
    ReinforcementSettings,
    SupervisedSettings,
)
from core.contracts.lineage import Lineage
from core.contracts.lora import ALL_LINEAR, LoraSettings, RankBudget, TargetModule
from core.contracts.training import (
    CurriculumSettings,
    DpoHyperparameters,
    EvaluationSettings,
    Hyperparameters,
    LearningRateGroup,
    OptimizerSettings,
    RolloutSettings,
    SupervisedHyperparameters,
    WarmUpSettings,
)

__all__ = [
    "ALL_LINEAR", "TERMINAL", "AlgorithmName", "AlgorithmSettings", "Contract", "CurriculumSettings", "DatasetReport", "DpoHyperparameters",
    "EvaluationSettings", "EventLevel", "EventType", "Grader", "Hyperparameters", "JobSettings", "JobSpec", "JobStatus",
    "LearningRateGroup", "LineFault", "Lineage", "LoraSettings", "MultiGrader", "OptimizerSettings", "RankBudget", "ReinforcementSettings",
    "RolloutSettings", "StringCheckGrader", "SupervisedHyperparameters", "SupervisedSettings", "TargetModule", "TextMetric",
    "TextSimilarityGrader", "TokenStats", "WarmUpSettings",
]  # fmt: skip

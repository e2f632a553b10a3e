"""Typed values that cross boundaries."""

from core.contracts.base import Contract
from core.contracts.dataset import DatasetReport, LineFault, TokenStats
from core.contracts.graders import Grader, MultiGrader, StringCheckGrader, TextMetric, TextSimilarityGrader
from core.contracts.job import TERMINAL, EventLevel, EventType, JobSpec, JobStatus, ReinforcementSettings
from core.contracts.lineage import Lineage
from core.contracts.training import (
    ALL_LINEAR,
    AlgorithmSettings,
    Hyperparameters,
    LoraSettings,
    OptimizerSettings,
    RolloutSettings,
    TargetModule,
)

__all__ = [
    "ALL_LINEAR", "TERMINAL", "AlgorithmSettings", "Contract", "DatasetReport", "EventLevel", "EventType", "Grader", "Hyperparameters",
    "JobSpec", "JobStatus", "LineFault", "Lineage", "LoraSettings", "MultiGrader", "OptimizerSettings", "ReinforcementSettings",
    "RolloutSettings", "StringCheckGrader", "TargetModule", "TextMetric", "TextSimilarityGrader", "TokenStats",
]  # fmt: skip

"""Loops over the scripted engine, without a database."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from core.contracts import JobSpec, OptimizerSettings
from engine.graders import GradeResult
from engine.grpo import GrpoLoop
from engine.loop.curriculum import Memory
from engine.loop.rollout import GradedGroup
from engine.loop.rows import PromptRow
from engine.supervised import SupervisedLoop
from engine.types import Completion, FinishReason, FloatArray, ForwardBackwardResult, LossSettings, OptimResult, SampleRequest, TrainGroup
from tests.scripted_engine import ScriptedClient, ScriptedEngine

NEAR = {
    "type": "text_similarity", "name": "near", "input": "{{sample.output_text}}", "reference": "{{item.answer}}",
    "evaluation_metric": "fuzzy_match",
}  # fmt: skip


def make_spec(*, grader: Any = NEAR, hyperparameters: Any = None, **changes: Any) -> JobSpec:
    """A job's spec; the method follows from the algorithm."""
    supervised = changes.get("algorithm", {}).get("name") in ("sft", "dpo")
    method = {"supervised": {}} if supervised else {"reinforcement": {"grader": grader}}
    for settings in method.values():
        settings["hyperparameters"] = hyperparameters or {"batch_size": 2}
    defaults = {
        "base_model": "scripted", "training_file_sha256": "0" * 64, "seed": 0, "lora": {"rank": 2, "target_modules": ["q_proj"]},
        "optimizer": {"learning_rate": 1e-2}, "rollout": {"max_tokens": 20},
    }  # fmt: skip
    return JobSpec.model_validate(defaults | method | changes)


def make_rows(count: int, *, answers: tuple[str, ...] = ("yes",)) -> list[PromptRow]:
    """Rows whose difficulty falls with their number."""
    return [PromptRow(({"role": "user", "content": f"q{i}"},), {"answer": "yes", "difficulty": -i}, answers) for i in range(count)]


@dataclass
class Recorder(ScriptedClient):
    """A client that keeps what it was asked."""

    engine: ScriptedEngine = field(default_factory=ScriptedEngine)
    asked: list[list[SampleRequest]] = field(default_factory=list[list[SampleRequest]])
    trained: list[tuple[list[TrainGroup], LossSettings]] = field(default_factory=list[tuple[list[TrainGroup], LossSettings]])
    rates: list[tuple[float, int | None]] = field(default_factory=list[tuple[float, int | None]])

    def __post_init__(self) -> None:
        super().__init__(self.engine, 1)

    @property
    def verbs(self) -> list[str]:
        """Names of the verbs that were called, in order."""
        return [verb for verb, _ in self.engine.calls]

    def sample(self, adapter_id: str | None, requests: Sequence[SampleRequest]) -> list[list[Completion]]:
        self.asked.append(list(requests))
        return super().sample(adapter_id, requests)

    def forward_backward(self, adapter_id: str, groups: Sequence[TrainGroup], loss: LossSettings) -> ForwardBackwardResult:
        self.trained.append((list(groups), loss))
        return super().forward_backward(adapter_id, groups, loss)

    def optim_step(
        self, adapter_id: str, optimizer: OptimizerSettings, *, learning_rate: float, total_steps: int | None = None
    ) -> OptimResult:
        self.rates.append((learning_rate, total_steps))
        return super().optim_step(adapter_id, optimizer, learning_rate=learning_rate, total_steps=total_steps)


def start(
    spec: JobSpec, rows: Sequence[PromptRow], num_steps: int, verbs: Recorder, *, held_out: Sequence[PromptRow] = (), memory: Memory = ()
) -> GrpoLoop | SupervisedLoop:
    """The job's loop on an adapter of its own."""
    make = GrpoLoop if spec.algorithm.samples else SupervisedLoop
    loop = make(verbs, "a", spec, rows, held_out, num_steps, memory=memory)
    if "a" not in verbs.engine.adapters:
        verbs.create_adapter("a", spec.lora, seed=spec.seed)
    loop.begin(verbs.engine.adapters["a"].fingerprint)
    return loop


def graded(
    lengths: Sequence[int], rewards: Sequence[float | None], *, truncated: Sequence[int] = (), logprobs: Sequence[FloatArray] | None = None
) -> GradedGroup:
    """A group of completions with these lengths and rewards."""
    completions: list[Completion] = []
    for i, length in enumerate(lengths):
        reason: FinishReason = "length" if i in truncated else "stop"
        own = np.zeros(length, np.float32) if logprobs is None else logprobs[i]
        completions.append(Completion(np.arange(length, dtype=np.int32), own, "", reason))
    return GradedGroup(0, np.array([1], dtype=np.int32), completions, [GradeResult(reward) for reward in rewards])

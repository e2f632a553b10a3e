"""Learning rates of a job's steps."""

import math

from core.contracts import JobSpec, LearningRateGroup, OptimizerSettings


def learning_rate_at(step: int, spec: JobSpec, num_steps: int) -> float:
    """Learning rate of step `step` (0 for the first): linear warm-up that reaches the peak at step warmup_steps - 1, then the schedule.

    linear and cosine would reach 0 at step `num_steps`, the one after the last. Steps of a supervised warm-up are not counted here.
    """
    warmup = spec.optimizer.warmup_steps
    if step < warmup:
        return spec.learning_rate * (step + 1) / warmup
    progress = min(1.0, (step - warmup) / max(1, num_steps - warmup))
    match spec.optimizer.schedule:
        case "constant":
            factor = 1.0
        case "linear":
            factor = 1.0 - progress
        case "cosine":
            factor = 0.5 * (1.0 + math.cos(math.pi * progress))
    return spec.learning_rate * factor


def optimizer_of(spec: JobSpec) -> OptimizerSettings:
    """The optimizer's settings, the rate of an adapter underneath among its groups; first, since the first group that matches counts."""
    if spec.start_mode != "stack" or not spec.start_learning_rate:
        return spec.optimizer
    start = LearningRateGroup(learning_rate=spec.start_learning_rate, part="start")
    return spec.optimizer.model_copy(update={"learning_rate_groups": (start, *spec.optimizer.learning_rate_groups)})


def num_updates(spec: JobSpec, num_steps: int) -> int:
    """Optimizer steps of a job of `num_steps` steps, the warm-up's included, if none is left out."""
    warm_up = spec.warm_up.steps
    return warm_up + (num_steps - warm_up) * spec.algorithm.updates_per_rollout

"""What held-out scores decide: which step is best, and when a job has stopped getting better."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from core.contracts import JobSpec


@dataclass(frozen=True)
class Standing:
    """The best evaluation so far."""

    best_step: int
    best_score: float
    num_since: int
    """Evaluations after it, none of them better."""


def is_due(spec: JobSpec, steps_done: int, num_steps: int) -> bool:
    """Whether the validation file is due: before the first step, every eval_interval, and at the end."""
    return steps_done % spec.eval_interval == 0 or steps_done == num_steps


def score_of(metrics: Mapping[str, float]) -> float | None:
    """A step's held-out score, higher is better: the mean reward, or the loss with its sign turned; None where there was no evaluation."""
    if "eval_reward_mean" in metrics:
        return metrics["eval_reward_mean"]
    return -metrics["eval_loss"] if "eval_loss" in metrics else None


def standing(scores: Sequence[tuple[int, float]], *, min_improvement: float) -> Standing | None:
    """Where a job stands.

    Args:
        scores: (step, score) in the order of steps.
        min_improvement: what a score must gain over the best one to be better.
    Returns:
        None without an evaluation.
    """
    best: Standing | None = None
    for step, score in scores:
        if best is None or score > best.best_score + min_improvement:
            best = Standing(step, score, 0)
        else:
            best = Standing(best.best_step, best.best_score, best.num_since + 1)
    return best

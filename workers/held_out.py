"""A job's held-out scores, read from what is stored of its steps: so a restart changes nothing about which step is best."""

from sqlalchemy import select
from sqlalchemy.orm import Session

from core.contracts import JobSpec
from core.tables import Metric
from engine.loop.evaluation import Standing, score_of, standing


def scores(session: Session, job_id: str, first: int, last: int) -> list[tuple[int, float]]:
    """(step, score) of the evaluations from step `first` to step `last`; later steps may be stored too, of a run that broke off."""
    rows = session.execute(
        select(Metric.step, Metric.values).where(Metric.job_id == job_id, Metric.step >= first, Metric.step <= last).order_by(Metric.step)
    )
    return [(step, score) for step, values in rows if (score := score_of(values)) is not None]


def best_trained(session: Session, job_id: str, spec: JobSpec, step: int, score: float | None = None) -> Standing | None:
    """The best evaluation of a trained step, up to `step`.

    Args:
        score: of `step`, where it is not stored yet.
    """
    stored = scores(session, job_id, 1, step if score is None else step - 1)
    return standing([*stored, *([] if score is None else [(step, score)])], min_improvement=spec.evaluation.min_improvement)


def stalled(session: Session, job_id: str, spec: JobSpec, step: int) -> Standing | None:
    """The best evaluation up to `step`, the start's included, once the job's patience is over; None before, and without patience."""
    patience = spec.evaluation.early_stop_patience
    if patience is None:
        return None
    found = standing(scores(session, job_id, 0, step), min_improvement=spec.evaluation.min_improvement)
    return found if found is not None and found.num_since >= patience else None

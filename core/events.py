"""What happened to a job, for its owner to read."""

from typing import Any

from sqlalchemy.orm import Session

from core.contracts.job import EventLevel, EventType
from core.ids import new_id
from core.tables import Event, Metric

_HEADLINES = (
    ("reward", "reward_mean"), ("loss", "loss"), ("evaluation reward", "eval_reward_mean"), ("evaluation loss", "eval_loss"),
)  # fmt: skip
"""What a step's event names: the first that the step has."""


def add_event(
    session: Session,
    job_id: str,
    message: str,
    *,
    level: EventLevel = "info",
    type: EventType = "message",
    data: dict[str, Any] | None = None,
) -> Event:
    """Appends an event; it is visible once the session commits."""
    event = Event(id=new_id("ftevent"), job_id=job_id, level=level, type=type, message=message, data=data or {})
    session.add(event)
    return event


def record_metrics(session: Session, job_id: str, step: int, values: dict[str, float]) -> None:
    """Stores one step's numbers. Those of an earlier try at the same step are replaced, and the owner is not told of it twice."""
    is_new = session.get(Metric, (job_id, step)) is None
    session.merge(Metric(job_id=job_id, step=step, values=values))
    if is_new:
        name, key = next(((name, key) for name, key in _HEADLINES if key in values), _HEADLINES[-1])
        add_event(session, job_id, f"Step {step}: {name} {values.get(key, 0.0):.3f}", type="metrics", data={"step": step, **values})

"""Tokens per key, model and day."""

import logging
from datetime import UTC, datetime

from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import SQLAlchemyError

from core.clock import now_s
from core.db import session_scope
from core.scope import Scope
from core.tables import Usage

log = logging.getLogger(__name__)


def record_usage(scope: Scope, model: str, *, prompt_tokens: int, completion_tokens: int) -> None:
    """Adds one request to the key's counters of today (UTC), in one statement: concurrent requests lose nothing.

    The completion is the client's already, so a database that is down costs the count and not the answer.
    """
    row = {
        "project_id": scope.project_id, "api_key_id": scope.api_key_id, "model": model,
        "day": datetime.fromtimestamp(now_s(), UTC).date().isoformat(),
        "num_requests": 1, "prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens,
    }  # fmt: skip
    added = {
        "num_requests": Usage.num_requests + 1,
        "prompt_tokens": Usage.prompt_tokens + prompt_tokens,
        "completion_tokens": Usage.completion_tokens + completion_tokens,
    }
    key = [Usage.project_id, Usage.api_key_id, Usage.model, Usage.day]
    try:
        with session_scope() as session:
            if session.get_bind().dialect.name == "sqlite":
                session.execute(sqlite.insert(Usage).values(row).on_conflict_do_update(index_elements=key, set_=added))
            else:
                session.execute(postgresql.insert(Usage).values(row).on_conflict_do_update(index_elements=key, set_=added))
    except SQLAlchemyError:
        log.exception("usage not counted: %s", row)

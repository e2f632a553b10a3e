"""Wake-ups for the workers. SQL holds what is to be done; a message that is lost costs a sweep's interval, never a job."""

import logging
from functools import lru_cache

from celery import Celery
from kombu.exceptions import OperationalError
from redis.exceptions import RedisError
from sqlalchemy.orm import Session

from core.db import after_commit
from core.settings import get_settings

log = logging.getLogger(__name__)

VALIDATE_JOB = "workers.validate_job"
RUN_JOB = "workers.run_job"
BROKER_TIMEOUT_S = 1.0


@lru_cache(maxsize=1)
def _client(broker_url: str) -> Celery:
    client = Celery("espalier-api", broker=broker_url, set_as_current=False)
    client.conf.update(
        task_ignore_result=True,
        broker_connection_retry=False,
        broker_transport_options={"socket_timeout": BROKER_TIMEOUT_S, "socket_connect_timeout": BROKER_TIMEOUT_S, "max_retries": 0},
    )
    return client


def wake(session: Session, task: str, job_id: str) -> None:
    """Sends `task` with the job's id after the commit; a broker that is down is logged, and the sweep finds the job."""

    def send() -> None:
        try:
            _client(get_settings().resolved_broker_url).send_task(task, args=[job_id], ignore_result=True, retry=False)
        except (OperationalError, RedisError, OSError) as error:
            log.warning("broker did not take %s(%s); the sweep will: %s", task, job_id, error)

    after_commit(session, send)

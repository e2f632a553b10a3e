"""/v1/fine_tuning/jobs."""

import re
from typing import Annotated

from fastapi import APIRouter, Depends, Request

from api.auth import CurrentScope
from api.openai import job_service
from api.openai.job_create import create_job
from api.openai.job_schemas import CheckpointObject, EventObject, JobCreate, JobObject
from api.paging import ListObject, Paging, list_object
from api.retries import IsRetry
from api.state import Store

router = APIRouter(prefix="/v1/fine_tuning/jobs", tags=["fine-tuning"])

_METADATA = re.compile(r"metadata\[(.{1,64})\]")


async def _raw_body(request: Request) -> bytes:
    return await request.body()


def _metadata_filter(request: Request) -> dict[str, str]:
    """`metadata[k]=v` pairs of the query."""
    pairs = ((_METADATA.fullmatch(name), value) for name, value in request.query_params.items())
    return {match[1]: value for match, value in pairs if match}


@router.post("")
def create(
    scope: CurrentScope, store: Store, is_retry: IsRetry, body: JobCreate, raw_body: Annotated[bytes, Depends(_raw_body)]
) -> JobObject:
    return create_job(scope, store, body, raw_body, is_retry=is_retry)


@router.get("")
def list_(scope: CurrentScope, params: Paging, metadata: Annotated[dict[str, str], Depends(_metadata_filter)]) -> ListObject[JobObject]:
    items, has_more = job_service.list_jobs(scope, params, metadata)
    return list_object(items, [item.id for item in items], has_more=has_more)


@router.get("/{job_id}")
def retrieve(scope: CurrentScope, job_id: str) -> JobObject:
    return job_service.retrieve_job(scope, job_id)


@router.post("/{job_id}/cancel")
def cancel(scope: CurrentScope, job_id: str) -> JobObject:
    return job_service.cancel_job(scope, job_id)


@router.post("/{job_id}/pause")
def pause(scope: CurrentScope, job_id: str) -> JobObject:
    return job_service.pause_job(scope, job_id)


@router.post("/{job_id}/resume")
def resume(scope: CurrentScope, job_id: str) -> JobObject:
    return job_service.resume_job(scope, job_id)


@router.get("/{job_id}/events")
def events(scope: CurrentScope, job_id: str, params: Paging) -> ListObject[EventObject]:
    items, has_more = job_service.list_events(scope, job_id, params)
    return list_object(items, [item.id for item in items], has_more=has_more)


@router.get("/{job_id}/checkpoints")
def checkpoints(scope: CurrentScope, job_id: str, params: Paging) -> ListObject[CheckpointObject]:
    items, has_more = job_service.list_checkpoints(scope, job_id, params)
    return list_object(items, [item.id for item in items], has_more=has_more)

"""/v1/files."""

from typing import Annotated
from urllib.parse import quote

from fastapi import APIRouter, Form, Query
from starlette.responses import StreamingResponse

from api.auth import CurrentScope
from api.openai import file_service
from api.openai.file_schemas import FileCreate, FileDeleted, FileObject, Purpose
from api.paging import MAX_PAGE, ListObject, Paging, list_object
from api.retries import IsRetry
from api.state import Store

router = APIRouter(prefix="/v1/files", tags=["files"])


@router.post("")
def create(
    scope: CurrentScope, store: Store, is_retry: IsRetry, form: Annotated[FileCreate, Form(media_type="multipart/form-data")]
) -> FileObject:
    return file_service.create_file(scope, store, form, is_retry=is_retry)


@router.get("")
def list_(
    scope: CurrentScope,
    params: Paging,
    limit: Annotated[int, Query(ge=1, le=MAX_PAGE)] = MAX_PAGE,
    purpose: Annotated[Purpose | None, Query()] = None,
) -> ListObject[FileObject]:
    items, has_more = file_service.list_files(scope, params.model_copy(update={"limit": limit}), purpose)
    return list_object(items, [item.id for item in items], has_more=has_more)


@router.get("/{file_id}")
def retrieve(scope: CurrentScope, file_id: str) -> FileObject:
    return file_service.retrieve_file(scope, file_id)


@router.get("/{file_id}/content")
def content(scope: CurrentScope, store: Store, file_id: str) -> StreamingResponse:
    row, chunks = file_service.file_content(scope, store, file_id)
    headers = {
        "content-length": str(row.num_bytes),
        "content-disposition": f"attachment; filename*=UTF-8''{quote(row.filename)}",
        "x-checksum-sha256": row.sha256,
    }
    return StreamingResponse(chunks, headers=headers, media_type="application/octet-stream")


@router.delete("/{file_id}")
def delete(scope: CurrentScope, file_id: str) -> FileDeleted:
    file_service.delete_file(scope, file_id)
    return FileDeleted(id=file_id)

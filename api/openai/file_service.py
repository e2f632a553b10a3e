"""Files: bytes are in the object store and hashed before the client hears of success."""

from collections.abc import Iterator
from typing import BinaryIO

from sqlalchemy import Select, or_
from sqlalchemy.orm import Session

from api.openai.file_schemas import FileCreate, FileObject
from api.paging import PageParams, fetch_page
from api.retries import WINDOW_S
from core.clock import now_s
from core.db import session_scope
from core.errors import InvalidInput, NotFound
from core.ids import new_id
from core.scope import Scope
from core.settings import get_settings
from core.tables import File
from registry.store import CHUNK_BYTES, ObjectStore

MAX_FILENAME = 255


def to_object(row: File) -> FileObject:
    """The wire's form of a file."""
    return FileObject(
        id=row.id, bytes=row.num_bytes, created_at=int(row.created_at), filename=row.filename, purpose=row.purpose,
        expires_at=None if row.expires_at is None else int(row.expires_at),
    )  # fmt: skip


def live_files(scope: Scope) -> Select[File]:
    """The project's files that are neither deleted nor expired."""
    return scope.select(File).where(File.deleted_at.is_(None), or_(File.expires_at.is_(None), File.expires_at > now_s()))


def get_file(session: Session, scope: Scope, file_id: str, *, param: str = "file_id") -> File:
    """One live file.

    Raises:
        NotFound: no such file in this project, or it was deleted or has expired; `param` names the field that asked.
    """
    row = session.scalar(live_files(scope).where(File.id == file_id))
    if row is None:
        raise NotFound(f"No file {file_id!r} in this project (it may be deleted or expired); upload it or list the files.", param=param)
    return row


def create_file(scope: Scope, store: ObjectStore, form: FileCreate, *, is_retry: bool) -> FileObject:
    """Stores an upload; a retry of one that was stored returns that one.

    Raises:
        InvalidInput: no content, no name, too large. Unavailable: the store does not answer.
    """
    filename = _filename(form.file.filename)
    sha256, num_bytes = store.put_blob_stream(_chunks(form.file.file), limit_bytes=get_settings().max_upload_bytes)
    if num_bytes == 0:
        raise InvalidInput("The file is empty; upload one with content.", param="file")
    if form.expires_anchor is not None and form.expires_seconds is None:
        raise InvalidInput("expires_after has an anchor and no seconds; give both or neither.", param="expires_after.seconds")
    created_at = now_s()
    with session_scope() as session:
        if is_retry:
            same = live_files(scope).where(
                File.sha256 == sha256, File.filename == filename, File.purpose == form.purpose, File.created_at > created_at - WINDOW_S
            )
            earlier = session.scalars(same.order_by(File.created_at.desc())).first()
            if earlier is not None:
                return to_object(earlier)
        row = File(
            id=new_id("file"), tenant_id=scope.tenant_id, project_id=scope.project_id, filename=filename, purpose=form.purpose,
            num_bytes=num_bytes, sha256=sha256, created_at=created_at,
            expires_at=None if form.expires_seconds is None else created_at + form.expires_seconds,
        )  # fmt: skip
        session.add(row)
        return to_object(row)


def list_files(scope: Scope, params: PageParams, purpose: str | None) -> tuple[list[FileObject], bool]:
    """One page of the project's files."""
    statement = live_files(scope)
    if purpose is not None:
        statement = statement.where(File.purpose == purpose)
    with session_scope(readonly=True) as session:
        rows, has_more = fetch_page(session, statement, params, sort=File.created_at, key=File.id)
        return [to_object(row) for row in rows], has_more


def retrieve_file(scope: Scope, file_id: str) -> FileObject:
    """One file of the project."""
    with session_scope(readonly=True) as session:
        return to_object(get_file(session, scope, file_id))


def delete_file(scope: Scope, file_id: str) -> None:
    """Hides a file for good. Its blob stays: jobs that were made from it must be able to resume, and equal content is shared."""
    with session_scope() as session:
        get_file(session, scope, file_id).deleted_at = now_s()


def file_content(scope: Scope, store: ObjectStore, file_id: str) -> tuple[File, Iterator[bytes]]:
    """A file's row and its bytes as a stream."""
    with session_scope(readonly=True) as session:
        row = get_file(session, scope, file_id)
    return row, store.read_range(row.sha256, 0, row.num_bytes)


def _filename(given: str | None) -> str:
    """The last part of the name that the client sent; some send a path."""
    name = (given or "").replace("\\", "/").rsplit("/", 1)[-1].strip()
    if not name or len(name) > MAX_FILENAME or not name.isprintable():
        raise InvalidInput(f"The file needs a printable name of at most {MAX_FILENAME} characters.", param="file")
    return name


def _chunks(file: BinaryIO) -> Iterator[bytes]:
    return iter(lambda: file.read(CHUNK_BYTES), b"")

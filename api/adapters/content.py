"""Downloads: the whole version as a tar, or one file; any byte range of either; checksums of the whole in the headers."""

import base64
import re
from collections.abc import Iterator
from typing import NamedTuple

from starlette.responses import Response, StreamingResponse

from api.adapters.service import get_adapter, get_version
from core.db import session_scope
from core.errors import InvalidInput, NotFound
from core.scope import Scope
from registry import download
from registry.store import ObjectStore

_RANGE = re.compile(r"bytes=(\d{0,18})-(\d{0,18})")


class RangeNotSatisfiable(InvalidInput):
    """The range begins behind the content's end."""

    default_code = "range_not_satisfiable"
    http_status = 416

    def __init__(self, num_bytes: int) -> None:
        super().__init__(f"The range is outside the content of {num_bytes} bytes; ask for bytes before its end.", param="range")


class Content(NamedTuple):
    """What a download would give in full."""

    num_bytes: int
    sha256: str
    filename: str
    media_type: str


def respond(
    scope: Scope, store: ObjectStore, name: str, version: str, file: str | None, *, range_header: str | None, if_none_match: str | None
) -> Response:
    """The download's answer.

    Args:
        file: adapter_config.json or adapter_model.safetensors; None for the tar of both.
        range_header: `bytes=a-b`, `bytes=a-` or `bytes=-n`; other forms are ignored, as RFC 9110 allows.
    Returns:
        200 with everything, 206 with a range, 304 where the client has it.
    Raises:
        NotFound: no such adapter, version or file. RangeNotSatisfiable.
    """
    with session_scope(readonly=True) as session:
        adapter = get_adapter(session, scope, name)
        row = get_version(session, adapter, version)
    manifest = download.load_manifest(store, row.digest)
    if file is None:
        num_bytes = download.tar_size(store, manifest)
        content = Content(num_bytes, row.tar_sha256, f"{adapter.name}-{row.digest[:12]}.tar", "application/x-tar")
    else:
        entry = next((entry for entry in download.files(store, manifest) if entry.name == file), None)
        if entry is None:
            known = " and ".join(sorted(manifest.files))
            raise NotFound(f"The adapter has no file {file!r}; it has {known}.", param="file")
        kind = "application/json" if file.endswith(".json") else "application/octet-stream"
        content = Content(entry.num_bytes, entry.sha256, file, kind)
    headers = {
        "etag": f'"{content.sha256}"',
        "accept-ranges": "bytes",
        "x-checksum-sha256": content.sha256,
        "digest": f"sha-256={base64.b64encode(bytes.fromhex(content.sha256)).decode()}",
        "content-disposition": f'attachment; filename="{content.filename}"',
        # Immutable, but only for those who hold the key.
        "cache-control": "private, max-age=31536000, immutable" if _names_content(version, row.digest) else "private, no-cache",
    }
    if if_none_match is not None and headers["etag"] in if_none_match:
        return Response(status_code=304, headers=headers)
    start, end = _parse_range(range_header, content.num_bytes)
    partial = (start, end) != (0, content.num_bytes)
    if partial:
        headers["content-range"] = f"bytes {start}-{end - 1}/{content.num_bytes}"
    headers["content-length"] = str(end - start)
    chunks: Iterator[bytes]
    if file is None:
        chunks = download.read_tar_range(store, manifest, start, end)
    else:
        chunks = download.read_file_range(store, manifest, file, start, end)
    return StreamingResponse(chunks, 206 if partial else 200, headers, content.media_type)


def _names_content(version: str, digest: str) -> bool:
    return len(version) >= 12 and digest.startswith(version)


def _parse_range(header: str | None, num_bytes: int) -> tuple[int, int]:
    """(first byte, byte behind the last) of a Range header; everything where there is none that is understood."""
    match = _RANGE.fullmatch(header.strip()) if header else None
    if match is None or (not match[1] and not match[2]):
        return 0, num_bytes
    if not match[1]:
        start, end = max(0, num_bytes - int(match[2])), num_bytes
    else:
        start = int(match[1])
        end = min(num_bytes, int(match[2]) + 1) if match[2] else num_bytes
        if match[2] and int(match[2]) < start:
            return 0, num_bytes
    if start >= end:
        raise RangeNotSatisfiable(num_bytes)
    return start, end

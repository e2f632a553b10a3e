"""The object store: a folder or an S3 bucket, by one small interface.

Blobs are content-addressed (`blobs/sha256/<hh>/<hex>`), so writing one twice is harmless and every read can be checked. Every write is
atomic: a reader sees the whole object or none (obstore stages and renames in a folder; S3 does it itself).
"""

import contextlib
import hashlib
import re
import tempfile
from collections.abc import Generator, Iterable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import obstore
from obstore.exceptions import BaseError
from obstore.store import LocalStore, S3Store

from core.errors import CorruptData, InvalidInput, NotFound, Unavailable
from core.settings import get_settings
from registry.manifest import SHA256_RE, blob_key, sha256_hex

CHUNK_BYTES = 1 << 20
# Uploads up to this size are spooled in memory, larger ones in a temporary file.
SPOOL_BYTES = 8 << 20
# obstore would try for three minutes; a request can't wait that long.
S3_MAX_RETRIES = 4
S3_RETRY_TIMEOUT_S = 20
_KEY = re.compile(r"[A-Za-z0-9._@-]+(?:/[A-Za-z0-9._@-]+)*")


class ObjectStore:
    """Objects by key, and blobs by content.

    Args:
        raw: obstore's own store, already confined to its folder or prefix.
    """

    def __init__(self, raw: LocalStore | S3Store) -> None:
        self.raw = raw

    def put_blob(self, data: bytes) -> str:
        """Stores bytes under their own SHA-256; storing them again changes nothing.

        Returns:
            The SHA-256, 64 lower-case hex digits.
        Raises:
            Unavailable: the store does not answer.
        """
        sha256 = sha256_hex(data)
        self._put_unless_there(sha256, data, len(data))
        return sha256

    def put_blob_stream(self, chunks: Iterable[bytes], *, limit_bytes: int | None = None) -> tuple[str, int]:
        """Stores a stream under its SHA-256; it is hashed while it is spooled to disk and is never whole in memory.

        Args:
            chunks: the content, in order.
            limit_bytes: largest content accepted; default none.
        Returns:
            (SHA-256 in hex, number of bytes).
        Raises:
            InvalidInput: more than `limit_bytes`; nothing was stored.
            Unavailable: the store does not answer.
        """
        digest, num_bytes = hashlib.sha256(), 0
        with tempfile.SpooledTemporaryFile(max_size=SPOOL_BYTES) as spool:
            for chunk in chunks:
                num_bytes += len(chunk)
                if limit_bytes is not None and num_bytes > limit_bytes:
                    message = f"The content is larger than the {limit_bytes} bytes allowed; split it."
                    raise InvalidInput(message, param="file", code="too_large")
                digest.update(chunk)
                spool.write(chunk)
            spool.seek(0)
            sha256 = digest.hexdigest()
            content = spool.read() if num_bytes <= SPOOL_BYTES else iter(lambda: spool.read(CHUNK_BYTES), b"")
            self._put_unless_there(sha256, content, num_bytes)
        return sha256, num_bytes

    def get_blob(self, sha256: str) -> bytes:
        """A whole blob, checked.

        Raises:
            NotFound: no such blob. CorruptData: what is stored does not have that digest. Unavailable: the store does not answer.
        """
        data = self.get(_checked_blob_key(sha256))
        if sha256_hex(data) != sha256:
            raise CorruptData(f"Blob {sha256} does not have that digest; restore it from a backup.")
        return data

    def blob_size(self, sha256: str) -> int:
        """Bytes of a blob. Errors as `get`."""
        return self._size(_checked_blob_key(sha256))

    def read_range(self, sha256: str, start: int, end: int) -> Iterator[bytes]:
        """Streams bytes start (inclusive) to end (exclusive) of a blob; a range can't be checked against the digest.

        Raises:
            NotFound, CorruptData (fewer bytes than asked for), Unavailable.
        """
        if start >= end:
            return
        key = _checked_blob_key(sha256)
        remaining = end - start
        with _translated(key):
            for chunk in obstore.get(self.raw, key, options={"range": (start, end)}).stream(min_chunk_size=CHUNK_BYTES):
                remaining -= len(chunk)
                yield bytes(chunk)
        if remaining:
            raise CorruptData(f"Blob {sha256} is {remaining} bytes shorter than it was.")

    def put(self, key: str, data: bytes) -> None:
        """Writes an object, replacing what was there.

        Raises:
            InvalidInput: the key has characters or parts that are not allowed. Unavailable: the store does not answer.
        """
        with _translated(_checked_key(key)):
            obstore.put(self.raw, key, data)

    def get(self, key: str) -> bytes:
        """A whole object.

        Raises:
            NotFound: no such object. Unavailable: the store does not answer.
        """
        with _translated(_checked_key(key)):
            return bytes(obstore.get(self.raw, key).bytes())

    def delete(self, key: str) -> None:
        """Removes an object; removing what is not there is no error."""
        with contextlib.suppress(NotFound), _translated(_checked_key(key)):
            obstore.delete(self.raw, key)

    def exists(self, key: str) -> bool:
        """Whether there is such an object."""
        try:
            self._size(_checked_key(key))
        except NotFound:
            return False
        return True

    def list_keys(self, folder: str) -> list[str]:
        """Keys of the objects under a folder (`states/job-1`), in no order.

        Raises:
            InvalidInput: the folder is no key. Unavailable: the store does not answer.
        """
        with _translated(_checked_key(folder)):
            return [str(entry["path"]) for page in obstore.list(self.raw, prefix=folder) for entry in page]

    def _size(self, key: str) -> int:
        with _translated(key):
            return obstore.head(self.raw, key)["size"]

    def _put_unless_there(self, sha256: str, content: bytes | Iterator[bytes], num_bytes: int) -> None:
        key = blob_key(sha256)
        # A file system that lost power may keep the name and lose bytes; the size tells.
        if self.exists(key) and self._size(key) == num_bytes:
            return
        with _translated(key):
            obstore.put(self.raw, key, content)


def open_store(url: str | Path | None = None) -> ObjectStore:
    """Opens the object store.

    Args:
        url: a folder, `file:///folder` or `s3://bucket/prefix` (endpoint and credentials from the settings); default the configured one.
    Raises:
        InvalidInput: another scheme, or no bucket.
    """
    text = str(url if url is not None else get_settings().resolved_store_url)
    parts = urlsplit(text)
    if parts.scheme == "s3":
        return ObjectStore(_open_s3(bucket=parts.netloc, prefix=parts.path.strip("/")))
    if parts.scheme == "file" and parts.netloc in ("", "localhost"):
        return ObjectStore(LocalStore(Path(unquote(parts.path)), mkdir=True))
    if "://" in text:
        raise InvalidInput(f"The object store {text!r} is neither a folder, file:///folder nor s3://bucket/prefix.", param="store_url")
    return ObjectStore(LocalStore(Path(text).absolute(), mkdir=True))


def _open_s3(*, bucket: str, prefix: str) -> S3Store:
    if not bucket:
        raise InvalidInput("The object store's URL names no bucket; write s3://bucket/prefix.", param="store_url")
    settings = get_settings()
    options: dict[str, Any] = {
        "region": settings.s3_region,
        "retry_config": {"max_retries": S3_MAX_RETRIES, "retry_timeout": timedelta(seconds=S3_RETRY_TIMEOUT_S)},
    }
    if settings.s3_endpoint:
        options["endpoint"] = settings.s3_endpoint
        options["client_options"] = {"allow_http": settings.s3_endpoint.startswith("http://")}
    if settings.s3_access_key_id and settings.s3_secret_access_key:
        options["access_key_id"] = settings.s3_access_key_id
        options["secret_access_key"] = settings.s3_secret_access_key.get_secret_value()
    return S3Store(bucket, prefix=prefix or None, **options)


def _checked_key(key: str) -> str:
    if _KEY.fullmatch(key) is None or any(part.strip(".") == "" for part in key.split("/")):
        raise InvalidInput(f"{key!r} is no object key: parts of letters, digits, '.', '_', '@', '-', joined by '/'.", param="key")
    return key


def _checked_blob_key(sha256: str) -> str:
    if SHA256_RE.fullmatch(sha256) is None:
        raise InvalidInput("A blob is named by its SHA-256, 64 lower-case hex digits.", param="sha256")
    return blob_key(sha256)


@contextlib.contextmanager
def _translated(key: str) -> Generator[None]:
    try:
        yield
    except FileNotFoundError as error:
        raise NotFound(f"The object store has no {key}.") from error
    except (BaseError, OSError) as error:
        raise Unavailable(f"The object store failed on {key}: {str(error).splitlines()[0]}") from error

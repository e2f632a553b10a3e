"""Downloads of adapter versions: single files, and a deterministic tar of which any byte range streams without being made first.

The tar (ustar; a folder `adapter-<digest 12>/` with the two files of the PEFT format) follows from the manifest and the files' sizes alone:
no times, owners or modes of any machine.
"""

import hashlib
import tarfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from core.errors import InvalidInput, NotFound
from registry.manifest import Manifest, manifest_key
from registry.store import ObjectStore

_BLOCK_BYTES = 512
_FILE_MODE = 0o644


@dataclass(frozen=True)
class FileEntry:
    """One file of a version."""

    name: str
    sha256: str
    num_bytes: int


@dataclass(frozen=True)
class _Segment:
    """A run of the tar's bytes: literal ones, or a whole blob."""

    num_bytes: int
    literal: bytes | None = None
    sha256: str | None = None


def load_manifest(store: ObjectStore, digest: str) -> Manifest:
    """The manifest of a version.

    Raises:
        NotFound, CorruptData, Unavailable.
    """
    return Manifest.from_bytes(store.get(manifest_key(digest)), digest=digest)


def files(store: ObjectStore, manifest: Manifest) -> list[FileEntry]:
    """A version's files by name, with sizes from the store."""
    return [FileEntry(name, sha256, store.blob_size(sha256)) for name, sha256 in sorted(manifest.files.items())]


def read_file_range(store: ObjectStore, manifest: Manifest, name: str, start: int, end: int) -> Iterator[bytes]:
    """Streams bytes start (inclusive) to end (exclusive) of one file.

    Raises:
        NotFound: the version has no such file. InvalidInput: the range is not inside the file.
    """
    entry = next((entry for entry in files(store, manifest) if entry.name == name), None)
    if entry is None:
        raise NotFound(f"The adapter has no file {name!r}; it has {' and '.join(sorted(manifest.files))}.", param="file")
    _check_range(start, end, entry.num_bytes)
    return store.read_range(entry.sha256, start, end)


def tar_size(store: ObjectStore, manifest: Manifest) -> int:
    """Bytes of the tar."""
    return sum(segment.num_bytes for segment in _segments(manifest, files(store, manifest)))


def read_tar_range(store: ObjectStore, manifest: Manifest, start: int, end: int) -> Iterator[bytes]:
    """Streams bytes start (inclusive) to end (exclusive) of the tar.

    Raises:
        InvalidInput: the range is not inside the tar. NotFound, CorruptData, Unavailable: of the store.
    """
    segments = _segments(manifest, files(store, manifest))
    _check_range(start, end, sum(segment.num_bytes for segment in segments))
    return _read(store, segments, start, end)


def tar_sha256(manifest: Manifest, contents: Mapping[str, bytes]) -> str:
    """SHA-256 (hex) of the tar of files at hand, by name, before they are in any store."""
    entries = [FileEntry(name, sha256, len(contents[name])) for name, sha256 in sorted(manifest.files.items())]
    by_sha256 = {sha256: contents[name] for name, sha256 in manifest.files.items()}
    digest = hashlib.sha256()
    for segment in _segments(manifest, entries):
        digest.update(by_sha256[segment.sha256] if segment.sha256 else segment.literal or b"")
    return digest.hexdigest()


def _read(store: ObjectStore, segments: list[_Segment], start: int, end: int) -> Iterator[bytes]:
    position = 0
    for segment in segments:
        low, high = max(start - position, 0), min(end - position, segment.num_bytes)
        position += segment.num_bytes
        if low >= high:
            continue
        if segment.sha256 is not None:
            yield from store.read_range(segment.sha256, low, high)
        elif segment.literal is not None:
            yield segment.literal[low:high]


def _segments(manifest: Manifest, entries: list[FileEntry]) -> list[_Segment]:
    segments: list[_Segment] = []
    for entry in entries:
        info = tarfile.TarInfo(f"adapter-{manifest.digest[:12]}/{entry.name}")
        info.size, info.mode = entry.num_bytes, _FILE_MODE
        header = info.tobuf(tarfile.USTAR_FORMAT)
        padding = bytes(-entry.num_bytes % _BLOCK_BYTES)
        segments += [
            _Segment(len(header), literal=header),
            _Segment(entry.num_bytes, sha256=entry.sha256),
            _Segment(len(padding), literal=padding),
        ]
    end = bytes(2 * _BLOCK_BYTES)
    return [*segments, _Segment(len(end), literal=end)]


def _check_range(start: int, end: int, num_bytes: int) -> None:
    if not 0 <= start <= end <= num_bytes:
        raise InvalidInput(f"Bytes {start} to {end} are not inside the content of {num_bytes} bytes.", param="range", code="bad_range")

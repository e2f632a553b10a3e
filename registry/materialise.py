"""Adapter versions out of the object store into a bounded local folder, every byte checked against its digest.

`<folder>/<digest>/` appears complete or not at all. No path is ever made from anything but digests and the two file names of the PEFT
format, so no name that a caller sends can leave the folder.

Needs the standard library, obstore and pydantic only: this runs in the engine host and inside vLLM.
"""

import fcntl
import hashlib
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Mapping, Set
from pathlib import Path

from core.errors import Conflict, CorruptData, InvalidInput, Unavailable
from registry.manifest import SHA256_RE, Manifest, manifest_key
from registry.store import ObjectStore

_STAGING_PREFIX = ".staging-"


class AdapterCacheFull(Unavailable):
    """All that is in the cache is in use; unload adapters or raise the limit."""

    default_code = "adapter_cache_full"


class AdapterCache:
    """A folder of adapter versions, each under its digest; the least recently used leave when `limit_bytes` is passed.

    One process owns a folder (a lock file says so), its threads share the object. What an earlier owner left is used again once its bytes
    are checked.

    Args:
        store: where versions come from.
        folder: made if missing.
        limit_bytes: bound on the sum of the adapters' files.
    Raises:
        Conflict: another process owns the folder.
    """

    def __init__(self, store: ObjectStore, folder: Path, *, limit_bytes: int) -> None:
        self._store = store
        self._folder = folder.absolute()
        self._limit_bytes = limit_bytes
        self._lock = threading.Lock()
        self._folder.mkdir(parents=True, exist_ok=True)
        self._owner = os.open(self._folder / ".owner", os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(self._owner)
            raise Conflict(f"Another process uses the adapter cache {self._folder}; give each server a folder of its own.") from error
        for leftover in self._folder.glob(f"{_STAGING_PREFIX}*"):
            shutil.rmtree(leftover, ignore_errors=True)

    def close(self) -> None:
        """Gives the folder up; what is in it stays."""
        os.close(self._owner)

    def materialise(self, digest: str, *, keep: Callable[[], Set[str]] = frozenset) -> Path:
        """Returns a folder with `adapter_config.json` and `adapter_model.safetensors` of one version.

        Args:
            digest: of the version's manifest, 64 lower-case hex digits.
            keep: called only when room is needed; returns digests that must stay because their files may be read again.
        Returns:
            `<folder>/<digest>`, its files checked just now.
        Raises:
            InvalidInput: `digest` is none, or the version alone is over the limit. NotFound: no such version. CorruptData: bytes don't
            match their digest. AdapterCacheFull: no room without what `keep` names. Unavailable: the store does not answer.
        """
        if SHA256_RE.fullmatch(digest) is None:
            raise InvalidInput("An adapter version's digest is 64 lower-case hex digits.", param="digest")
        files = Manifest.from_bytes(self._store.get(manifest_key(digest)), digest=digest).files
        with self._lock:
            final = self._folder / digest
            if _holds(final, files):
                os.utime(final)
                return final
            _remove(final)
            self._make_room(sum(self._store.blob_size(sha256) for sha256 in files.values()), keep)
            staging = Path(tempfile.mkdtemp(prefix=_STAGING_PREFIX, dir=self._folder))
            try:
                for name, sha256 in files.items():
                    self._fetch(sha256, staging / name)
                staging.rename(final)
            except BaseException:
                shutil.rmtree(staging, ignore_errors=True)
                raise
            return final

    def _fetch(self, sha256: str, target: Path) -> None:
        digest = hashlib.sha256()
        num_bytes = self._store.blob_size(sha256)
        with target.open("xb") as file:
            for chunk in self._store.read_range(sha256, 0, num_bytes):
                digest.update(chunk)
                file.write(chunk)
        if digest.hexdigest() != sha256:
            raise CorruptData(f"Blob {sha256} does not have that digest.")

    def _make_room(self, needed_bytes: int, keep: Callable[[], Set[str]]) -> None:
        if needed_bytes > self._limit_bytes:
            raise InvalidInput(
                f"The adapter takes {needed_bytes} bytes and the whole cache {self._limit_bytes}; raise ESPALIER_RESOLVER_CACHE_BYTES."
            )
        entries = sorted(
            (entry for entry in self._folder.iterdir() if SHA256_RE.fullmatch(entry.name)), key=lambda entry: entry.lstat().st_mtime_ns
        )
        sizes = {entry: sum(file.lstat().st_size for file in entry.iterdir()) for entry in entries if not entry.is_symlink()}
        used_bytes = sum(sizes.values())
        if used_bytes + needed_bytes <= self._limit_bytes:
            return
        kept = keep()
        for entry, size in sizes.items():
            if entry.name in kept:
                continue
            _remove(entry)
            used_bytes -= size
            if used_bytes + needed_bytes <= self._limit_bytes:
                return
        raise AdapterCacheFull(
            f"The adapter cache {self._folder} is full of adapters in use ({used_bytes} of {self._limit_bytes} bytes); unload some, or "
            "raise ESPALIER_RESOLVER_CACHE_BYTES."
        )


def _holds(folder: Path, files: Mapping[str, str]) -> bool:
    """Whether `folder` is a real folder that holds exactly these files with these digests."""
    if folder.is_symlink() or not folder.is_dir() or sorted(entry.name for entry in folder.iterdir()) != sorted(files):
        return False
    for name, sha256 in files.items():
        if (folder / name).is_symlink():
            return False
        with (folder / name).open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != sha256:
                return False
    return True


def _remove(entry: Path) -> None:
    if entry.is_symlink() or entry.is_file():
        entry.unlink()
    elif entry.exists():
        shutil.rmtree(entry)

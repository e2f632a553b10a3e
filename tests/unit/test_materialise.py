"""The adapter cache: complete or not at all, checked, bounded, and nothing outside its folder."""

import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from core.errors import Conflict, CorruptData, InvalidInput, NotFound
from registry.manifest import CONFIG_FILE, WEIGHTS_FILE, Manifest, blob_key, manifest_key, sha256_hex
from registry.materialise import AdapterCache, AdapterCacheFull
from registry.store import ObjectStore, open_store

CONFIG = b'{"r": 4}'
WEIGHTS_BYTES = 1000
VERSION_BYTES = WEIGHTS_BYTES + len(CONFIG)


def publish(store: ObjectStore, seed: int) -> str:
    weights = bytes([seed]) * WEIGHTS_BYTES
    manifest = Manifest({CONFIG_FILE: store.put_blob(CONFIG), WEIGHTS_FILE: store.put_blob(weights)})
    store.put(manifest_key(manifest.digest), manifest.to_bytes())
    return manifest.digest


@pytest.fixture
def store(tmp_path: Path) -> ObjectStore:
    return open_store(tmp_path / "store")


@pytest.fixture
def cache(store: ObjectStore, tmp_path: Path) -> Iterator[AdapterCache]:
    opened = AdapterCache(store, tmp_path / "cache", limit_bytes=3 * VERSION_BYTES)
    yield opened
    opened.close()


def held(tmp_path: Path) -> set[str]:
    return {entry.name for entry in (tmp_path / "cache").iterdir() if not entry.name.startswith(".owner")}


def test_materialises_both_files_and_reuses_them(store: ObjectStore, cache: AdapterCache) -> None:
    digest = publish(store, 1)
    folder = cache.materialise(digest)
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == {CONFIG_FILE: CONFIG, WEIGHTS_FILE: b"\x01" * WEIGHTS_BYTES}
    before = (folder / WEIGHTS_FILE).stat().st_ino
    assert cache.materialise(digest) == folder
    assert (folder / WEIGHTS_FILE).stat().st_ino == before


@pytest.mark.parametrize("digest", ["", "../../etc", "A" * 64, "0" * 63, "0" * 64 + "\n", "/" + "0" * 63])
def test_what_is_no_digest_is_refused_before_anything_is_read(cache: AdapterCache, tmp_path: Path, digest: str) -> None:
    with pytest.raises(InvalidInput):
        cache.materialise(digest)
    assert held(tmp_path) == set()


def test_missing_version(cache: AdapterCache) -> None:
    with pytest.raises(NotFound):
        cache.materialise("0" * 64)


def test_corrupt_manifest_and_corrupt_blob_leave_nothing(store: ObjectStore, cache: AdapterCache, tmp_path: Path) -> None:
    digest = publish(store, 1)
    blob = blob_key(sha256_hex(b"\x01" * WEIGHTS_BYTES))
    store.put(blob, b"\x02" * WEIGHTS_BYTES)
    with pytest.raises(CorruptData):
        cache.materialise(digest)
    store.put(blob, b"\x01" * (WEIGHTS_BYTES - 1))
    with pytest.raises(CorruptData):
        cache.materialise(digest)
    store.put(blob, b"\x01" * WEIGHTS_BYTES)
    manifest = store.get(manifest_key(digest))
    store.put(manifest_key(digest), manifest + b" ")
    with pytest.raises(CorruptData):
        cache.materialise(digest)
    assert held(tmp_path) == set()
    store.put(manifest_key(digest), manifest)
    assert cache.materialise(digest).is_dir()


def test_a_manifest_can_not_name_a_path(store: ObjectStore, cache: AdapterCache, tmp_path: Path) -> None:
    content = b'{"files":{"../evil":"%b"}}' % store.put_blob(b"evil").encode()
    digest = sha256_hex(content)
    store.put(manifest_key(digest), content)
    with pytest.raises(CorruptData):
        cache.materialise(digest)
    assert not (tmp_path / "evil").exists()
    assert held(tmp_path) == set()


def test_a_tampered_or_linked_entry_is_made_anew_and_the_link_target_stays(store: ObjectStore, cache: AdapterCache, tmp_path: Path) -> None:
    digest = publish(store, 1)
    folder = cache.materialise(digest)
    (folder / WEIGHTS_FILE).write_bytes(b"\x00" * WEIGHTS_BYTES)
    assert (cache.materialise(digest) / WEIGHTS_FILE).read_bytes() == b"\x01" * WEIGHTS_BYTES
    outside = tmp_path / "outside"
    folder.rename(outside)
    folder.symlink_to(outside)
    assert not cache.materialise(digest).is_symlink()
    assert sorted(file.name for file in outside.iterdir()) == [CONFIG_FILE, WEIGHTS_FILE]


def test_least_recently_used_leave_but_not_those_in_use(store: ObjectStore, cache: AdapterCache, tmp_path: Path) -> None:
    digests = [publish(store, seed) for seed in range(5)]
    for age, digest in enumerate(digests[:3]):
        os.utime(cache.materialise(digest), ns=(age, age))
    cache.materialise(digests[0])
    cache.materialise(digests[3])
    assert held(tmp_path) == {digests[0], digests[2], digests[3]}
    cache.materialise(digests[4], keep=lambda: {digests[2], digests[0]})
    assert held(tmp_path) == {digests[0], digests[2], digests[4]}
    with pytest.raises(AdapterCacheFull):
        cache.materialise(digests[1], keep=lambda: held(tmp_path))
    assert held(tmp_path) == {digests[0], digests[2], digests[4]}


def test_a_version_larger_than_the_cache_is_refused(store: ObjectStore, tmp_path: Path) -> None:
    small = AdapterCache(store, tmp_path / "cache", limit_bytes=VERSION_BYTES - 1)
    with pytest.raises(InvalidInput, match="ESPALIER_RESOLVER_CACHE_BYTES"):
        small.materialise(publish(store, 1))
    small.close()


def test_one_owner_and_leftovers_of_a_killed_one_are_cleared(store: ObjectStore, tmp_path: Path) -> None:
    first = AdapterCache(store, tmp_path / "cache", limit_bytes=VERSION_BYTES)
    with pytest.raises(Conflict):
        AdapterCache(store, tmp_path / "cache", limit_bytes=VERSION_BYTES)
    digest = publish(store, 1)
    first.materialise(digest)
    first.close()
    (tmp_path / "cache" / ".staging-half").mkdir()
    following = AdapterCache(store, tmp_path / "cache", limit_bytes=VERSION_BYTES)
    assert held(tmp_path) == {digest}
    following.close()


def test_many_threads_ask_for_the_same_and_for_others(store: ObjectStore, cache: AdapterCache, tmp_path: Path) -> None:
    digests = [publish(store, seed) for seed in range(3)] * 8
    together = threading.Barrier(8)

    def one(digest: str) -> Path:
        together.wait()
        return cache.materialise(digest)

    with ThreadPoolExecutor(8) as pool:
        folders = list(pool.map(one, digests))
    assert {folder.name for folder in folders} == held(tmp_path) == set(digests)

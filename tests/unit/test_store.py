"""The object store, on a folder and on S3 (moto's server).

1. Blobs are named by content, written once, and checked when read.
2. Ranges are exact, also over chunk borders.
3. No key leaves the store.
4. A stream over the limit stores nothing.
"""

import hashlib
import socket
from collections.abc import Iterator
from pathlib import Path

import boto3
import pytest
from moto.server import ThreadedMotoServer

from core.errors import CorruptData, InvalidInput, NotFound, Unavailable
from core.settings import get_settings
from registry.manifest import blob_key
from registry.store import CHUNK_BYTES, SPOOL_BYTES, ObjectStore, open_store

SECRET = "not-a-secret"


@pytest.fixture(scope="module")
def s3_endpoint() -> Iterator[str]:
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    endpoint = f"http://{host}:{port}"
    client = boto3.client("s3", endpoint_url=endpoint, region_name="us-east-1", aws_access_key_id="test", aws_secret_access_key=SECRET)
    client.create_bucket(Bucket="espalier")
    yield endpoint
    server.stop()


@pytest.fixture(params=["folder", "s3"])
def store(request: pytest.FixtureRequest, fresh_settings: Path, monkeypatch: pytest.MonkeyPatch) -> ObjectStore:
    if request.param == "folder":
        return open_store()
    monkeypatch.setenv("ESPALIER_S3_ENDPOINT", request.getfixturevalue("s3_endpoint"))
    monkeypatch.setenv("ESPALIER_S3_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("ESPALIER_S3_SECRET_ACCESS_KEY", SECRET)
    get_settings.cache_clear()
    return open_store(f"s3://espalier/{fresh_settings.name}")


def test_blob_round_trip(store: ObjectStore) -> None:
    data = b"some bytes" * 1000
    sha256 = store.put_blob(data)
    assert sha256 == hashlib.sha256(data).hexdigest() == store.put_blob(data)
    assert store.get_blob(sha256) == data
    assert store.blob_size(sha256) == len(data)
    assert store.get(f"blobs/sha256/{sha256[:2]}/{sha256}") == data


@pytest.mark.parametrize("num_bytes", [0, 1, SPOOL_BYTES, SPOOL_BYTES + CHUNK_BYTES + 7])
def test_streamed_blob(store: ObjectStore, num_bytes: int) -> None:
    data = bytes(range(256)) * (num_bytes // 256 + 1)
    data = data[:num_bytes]
    chunks = [data[i : i + 300_000] for i in range(0, num_bytes, 300_000)]
    sha256, counted = store.put_blob_stream(iter(chunks), limit_bytes=num_bytes)
    assert (sha256, counted) == (hashlib.sha256(data).hexdigest(), num_bytes)
    assert store.get_blob(sha256) == data


def test_stream_over_the_limit_stores_nothing(store: ObjectStore) -> None:
    with pytest.raises(InvalidInput, match="larger than"):
        store.put_blob_stream([b"a" * 10, b"b"], limit_bytes=10)
    assert not store.exists(blob_key(hashlib.sha256(b"a" * 10 + b"b").hexdigest()))


def test_stream_stops_reading_at_the_limit(store: ObjectStore) -> None:
    def endless() -> Iterator[bytes]:
        while True:
            yield b"x" * 1000

    with pytest.raises(InvalidInput):
        store.put_blob_stream(endless(), limit_bytes=10_000)


def test_ranges(store: ObjectStore) -> None:
    data = bytes(i * 7 % 251 for i in range(3 * CHUNK_BYTES + 5))
    sha256 = store.put_blob(data)
    for start, end in ((0, len(data)), (0, 1), (CHUNK_BYTES - 1, 2 * CHUNK_BYTES + 1), (len(data) - 1, len(data)), (5, 5)):
        assert b"".join(store.read_range(sha256, start, end)) == data[start:end]
    with pytest.raises(CorruptData, match="shorter"):
        list(store.read_range(sha256, len(data) - 2, len(data) + 3))


def test_changed_blob_is_noticed(store: ObjectStore) -> None:
    sha256 = store.put_blob(b"truth")
    store.put(blob_key(sha256), b"lies!")
    with pytest.raises(CorruptData, match=sha256):
        store.get_blob(sha256)


def test_truncated_blob_is_mended_by_the_next_put(store: ObjectStore) -> None:
    sha256 = store.put_blob(b"whole")
    store.put(blob_key(sha256), b"who")
    store.put_blob(b"whole")
    assert store.get_blob(sha256) == b"whole"


def test_objects(store: ObjectStore) -> None:
    key = "states/ftjob-1/5-1.safetensors"
    assert not store.exists(key)
    store.put(key, b"one")
    store.put(key, b"two")
    assert store.exists(key)
    assert store.get(key) == b"two"
    store.delete(key)
    store.delete(key)
    assert not store.exists(key)
    with pytest.raises(NotFound, match=key):
        store.get(key)
    with pytest.raises(NotFound):
        store.get_blob("0" * 64)


@pytest.mark.parametrize("key", ["", "/etc/passwd", "../up", "a/../../up", "a//b", "a/./b", "a\\b", "a b", "a/", "%2e%2e/up", "a\n"])
def test_keys_that_would_leave_the_store(store: ObjectStore, key: str) -> None:
    for call in (store.get, store.delete, store.exists, lambda name: store.put(name, b"")):
        with pytest.raises(InvalidInput):
            call(key)


@pytest.mark.parametrize("sha256", ["", "..", "A" * 64, "0" * 63, "0" * 64 + "\n"])
def test_blob_names(store: ObjectStore, sha256: str) -> None:
    with pytest.raises(InvalidInput):
        store.get_blob(sha256)


def test_urls(tmp_path: Path) -> None:
    sha256 = open_store(tmp_path / "a folder").put_blob(b"x")
    assert open_store(f"file://{tmp_path}/a%20folder").get_blob(sha256) == b"x"
    for url in ("http://example.com/x", "s3:///x", "file://host/x"):
        with pytest.raises(InvalidInput) as caught:
            open_store(url)
        assert caught.value.param == "store_url"


def test_store_that_does_not_answer(fresh_settings: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        monkeypatch.setenv("ESPALIER_S3_ENDPOINT", f"http://127.0.0.1:{closed.getsockname()[1]}")
        monkeypatch.setenv("ESPALIER_S3_ACCESS_KEY_ID", "test")
        monkeypatch.setenv("ESPALIER_S3_SECRET_ACCESS_KEY", SECRET)
        get_settings.cache_clear()
        with pytest.raises(Unavailable, match="failed on some/key") as caught:
            open_store("s3://espalier").get("some/key")
    assert SECRET not in caught.value.message

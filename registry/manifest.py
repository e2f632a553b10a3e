"""What an adapter version consists of. Its digest is the SHA-256 of the manifest's canonical JSON, so equal content is one version.

In the object store: `adapters/<digest>/manifest.json`, and every file as `blobs/sha256/<hh>/<hex>`.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from core.errors import CorruptData

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
ADAPTER_FILES = (CONFIG_FILE, WEIGHTS_FILE)
SHA256_RE = re.compile(r"[0-9a-f]{64}")


def sha256_hex(data: bytes) -> str:
    """SHA-256 of `data`, 64 lower-case hex digits."""
    return hashlib.sha256(data).hexdigest()


def blob_key(sha256: str) -> str:
    """Object store key of a content-addressed blob."""
    return f"blobs/sha256/{sha256[:2]}/{sha256}"


def manifest_key(digest: str) -> str:
    """Object store key of an adapter version's manifest."""
    return f"adapters/{digest}/manifest.json"


@dataclass(frozen=True)
class Manifest:
    """File name to SHA-256 (hex) of exactly the two files of the PEFT format."""

    files: Mapping[str, str]

    def __post_init__(self) -> None:
        if sorted(self.files) != sorted(ADAPTER_FILES):
            raise CorruptData(f"A manifest names {' and '.join(ADAPTER_FILES)} and nothing else; this one names {sorted(self.files)}.")
        for name, sha256 in self.files.items():
            if SHA256_RE.fullmatch(sha256) is None:
                raise CorruptData(f"The manifest's entry for {name} is no SHA-256.")

    def to_bytes(self) -> bytes:
        """Canonical JSON: what is stored and what the digest is of."""
        return json.dumps({"files": dict(self.files)}, sort_keys=True, separators=(",", ":")).encode()

    @property
    def digest(self) -> str:
        """Name of the adapter version, 64 lower-case hex digits."""
        return sha256_hex(self.to_bytes())

    @classmethod
    def from_bytes(cls, data: bytes, *, digest: str) -> "Manifest":
        """Reads a stored manifest.

        Raises:
            CorruptData: the bytes do not have that digest, or are no manifest.
        """
        if sha256_hex(data) != digest:
            raise CorruptData(f"The manifest of adapter version {digest} does not have that digest.")
        try:
            document: Any = json.loads(data)
            return cls({str(name): str(sha256) for name, sha256 in document["files"].items()})
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise CorruptData(f"The manifest of adapter version {digest} can't be read.") from error

"""Adapters by name: a request for `<tenant_id>/<project>/<adapter>@<digest>` makes vLLM fetch that version from the object store.

vLLM asks a resolver once per name and then keeps the folder's path: should it drop the weights from its own cache, it reads the files
again, and a missing file there ends the engine. So files of names that vLLM still lists, or dropped a short while ago (requests may be in
flight), stay.
"""

# vLLM is installed in its own environment only, where the type checker does not look.
# pyright: reportMissingImports=false, reportUntypedBaseClass=false

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Collection
from pathlib import Path

from fastapi import HTTPException
from vllm.lora.request import LoRARequest
from vllm.lora.resolver import LoRAResolver, LoRAResolverRegistry

from core.errors import EspalierError, NotFound
from core.settings import Settings, get_settings
from registry.materialise import AdapterCache
from registry.replica_name import parse_replica_name
from registry.store import open_store

logger = logging.getLogger(__name__)

RESOLVER_NAME = "espalier"
# Longer than any request: the files of an unloaded name may still be read for one that began before.
RELEASE_GRACE_S = 600.0


class StoreResolver(LoRAResolver):
    """Materialises adapter versions from the object store into a bounded folder."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._cache: AdapterCache | None = None
        self._opening = threading.Lock()
        self._last_listed_s: dict[str, float] = {}
        self._listed_names: Callable[[], Collection[str]] | None = None

    def bind(self, listed_names: Callable[[], Collection[str]]) -> None:
        """Tells the resolver how to ask which adapter names vLLM lists. Unbound, it holds every name that it ever resolved for listed."""
        self._listed_names = listed_names

    def released(self, lora_name: str) -> None:
        """Notes that vLLM no longer lists the name as of now."""
        name = parse_replica_name(lora_name)
        if name is not None:
            self._last_listed_s[name.digest] = time.monotonic()

    async def resolve_lora(self, base_model_name: str, lora_name: str) -> LoRARequest | None:
        """Returns the request to load, or None for a name of another form and for a version that the store lacks (vLLM answers 404).

        Raises:
            HTTPException: anything else that is wrong, with the error's own status (500 for corrupt data, 503 for a full cache or a store
            that does not answer) and `code: message`; the next request tries again.
        """
        name = parse_replica_name(lora_name)
        if name is None:
            return None
        self._last_listed_s[name.digest] = time.monotonic()
        try:
            folder = await asyncio.to_thread(self._materialise, name.digest)
        except NotFound as error:
            logger.info("No adapter version %s: %s", lora_name, error)
            return None
        except EspalierError as error:
            # vLLM has no resolver error of its own; one it does not know would reach the HTTP server raw, which then closes the connection.
            raise HTTPException(error.http_status, f"{error.code}: {error.message}") from error
        # vLLM puts its own id in the place of this one.
        return LoRARequest(lora_name=lora_name, lora_int_id=1, lora_path=str(folder))

    def _materialise(self, digest: str) -> Path:
        # Opened on first use: general plugins run in every vLLM process, the folder belongs to the one that serves.
        with self._opening:
            if self._cache is None:
                store = open_store()
                folder = self._settings.resolver_cache or self._settings.cache_dir / "vllm-adapters"
                self._cache = AdapterCache(store, folder, limit_bytes=self._settings.resolver_cache_bytes)
        return self._cache.materialise(digest, keep=self._digests_in_use)

    def _digests_in_use(self) -> set[str]:
        now_s = time.monotonic()
        if self._listed_names is None:
            return set(self._last_listed_s)
        for listed in self._listed_names():
            name = parse_replica_name(listed)
            if name is not None:
                self._last_listed_s[name.digest] = now_s
        return {digest for digest, seen_s in self._last_listed_s.items() if now_s - seen_s < RELEASE_GRACE_S}


def register() -> None:
    """Registers the resolver with vLLM under `espalier`."""
    if RESOLVER_NAME not in LoRAResolverRegistry.get_supported_resolvers():
        LoRAResolverRegistry.register_resolver(RESOLVER_NAME, StoreResolver(get_settings()))


def registered_resolver() -> StoreResolver:
    """The resolver of this process."""
    resolver = LoRAResolverRegistry.get_resolver(RESOLVER_NAME)
    assert isinstance(resolver, StoreResolver)
    return resolver

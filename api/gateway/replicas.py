"""Replicas: which one to ask, and how an adapter gets there."""

import asyncio
import hashlib
import itertools
import time

import httpx
from starlette.concurrency import run_in_threadpool

from api.gateway.target import Target
from core.errors import Conflict, InvalidInput, Unavailable
from core.settings import Settings
from registry.materialise import AdapterCache
from registry.store import ObjectStore

DOWN_S = 5.0
"""How long a replica that did not answer is asked last."""
MAX_CACHES = 64


class Replicas:
    """The serving replicas of this platform, as one API process sees them. Used from the event loop only.

    Args:
        http: client towards replicas.
        store: where adapter versions are.
        settings: names the replicas and the cache's folder and bound.
    """

    def __init__(self, http: httpx.AsyncClient, store: ObjectStore, settings: Settings) -> None:
        self.http = http
        self._store = store
        self._settings = settings
        self._down_until_s: dict[str, float] = {}
        self._turn = itertools.count()
        self._loading: dict[tuple[str, str], asyncio.Task[None]] = {}
        self._cache: AdapterCache | None = None
        self._cache_lock = asyncio.Lock()

    def close(self) -> None:
        """Gives the adapter cache's folder up."""
        if self._cache is not None:
            self._cache.close()

    def order(self, target: Target) -> list[str]:
        """Replicas in the order to try: an adapter's own first, so that few replicas hold each; the base's by turns; silent ones last."""
        urls = list(self._settings.resolved_replica_urls)
        if target.digest is None:
            turn = next(self._turn) % len(urls)
            urls = urls[turn:] + urls[:turn]
        else:
            # Rendezvous hashing: a replica that comes or goes moves only its own adapters.
            urls.sort(key=lambda url: hashlib.sha256(f"{url} {target.digest}".encode()).digest())
        now = time.monotonic()
        return sorted(urls, key=lambda url: self._down_until_s.get(url, 0.0) > now)

    def mark_down(self, url: str) -> None:
        """Puts a replica that did not answer to the end of the order for a while."""
        self._down_until_s[url] = time.monotonic() + DOWN_S

    async def load(self, url: str, target: Target) -> None:
        """Makes a replica load an adapter; requests that want the same share one load, which outlives a client that leaves.

        Raises:
            InvalidInput: the replica refuses the adapter. Unavailable: replica or object store does not answer, or the replica can't load.
        """
        key = (url, target.replica_name)
        task = self._loading.get(key)
        if task is None:
            task = asyncio.create_task(self._load(url, target))
            self._loading[key] = task
            task.add_done_callback(lambda done: self._forget(key, done))
        await asyncio.shield(task)

    def _forget(self, key: tuple[str, str], done: asyncio.Task[None]) -> None:
        del self._loading[key]
        if not done.cancelled():
            done.exception()  # looked at, so that asyncio does not report one that no request waited for

    async def _load(self, url: str, target: Target) -> None:
        assert target.digest is not None
        cache = await self._open_cache()
        folder = await run_in_threadpool(cache.materialise, target.digest)
        body = {"lora_name": target.replica_name, "lora_path": str(folder)}
        try:
            response = await self.http.post(f"{url}/v1/load_lora_adapter", json=body)
        except httpx.TransportError as error:
            self.mark_down(url)
            raise Unavailable("The serving replica does not answer; try again.", code="replica_unavailable") from error
        if response.is_success or (response.status_code == 400 and "already" in response.text):
            return
        if response.status_code in (404, 405):
            raise Unavailable("The replica can't load adapters; its operator must allow runtime LoRA updates.", code="replica_fixed")
        if response.status_code < 500:
            reason = scrub(error_text(response), target).replace(str(folder), "the adapter")
            raise InvalidInput(f"The serving replica refuses this adapter: {reason}", param="model", code="adapter_refused")
        raise Unavailable("The serving replica failed to load the adapter; try again.", code="replica_failed")

    async def _open_cache(self) -> AdapterCache:
        async with self._cache_lock:
            if self._cache is None:
                self._cache = await run_in_threadpool(self._claim_cache)
            return self._cache

    def _claim_cache(self) -> AdapterCache:
        """The first folder that no other API process of this machine owns."""
        for index in range(MAX_CACHES):
            folder = self._settings.cache_dir / f"gateway-{index}"
            try:
                return AdapterCache(self._store, folder, limit_bytes=self._settings.resolver_cache_bytes)
            except Conflict:
                continue
        raise Unavailable(f"{MAX_CACHES} API processes own adapter caches in {self._settings.cache_dir}; stop some.")


def error_text(response: httpx.Response) -> str:
    """The message of a replica's error, in any of the forms that vLLM has used."""
    try:
        body = response.json()
    except ValueError:
        return response.text[:500] or f"HTTP {response.status_code}"
    for part in (body.get("error"), body) if isinstance(body, dict) else ():
        if isinstance(part, dict) and isinstance(part.get("message"), str):
            return part["message"]
    return str(body)[:500]


def scrub(text: str, target: Target) -> str:
    """A replica's words with the client's own name for the model in them."""
    return text.replace(target.replica_name, target.asked_name)

"""The platform's REST API as the demo uses it: OpenAI's wire over httpx."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, Self

import httpx

from core.errors import EspalierError, NotAuthenticated, Unavailable

PARALLEL_REQUESTS = 24


class RequestRefused(EspalierError):
    """The API answered with an error."""

    default_code = "request_refused"


class DemoClient:
    """One project's view of the platform.

    Every method raises NotAuthenticated for a key that is not known, RequestRefused for any other error answer, Unavailable when
    nothing answers.
    """

    def __init__(self, url: str, key: str) -> None:
        # Reads of the API are quick; a chat completion may wait behind a training step.
        timeout = httpx.Timeout(300.0, connect=10.0)
        limits = httpx.Limits(max_connections=PARALLEL_REQUESTS)
        self._http = httpx.Client(
            base_url=f"{url}/v1", headers={"Authorization": f"Bearer {key}"}, timeout=timeout, limits=limits, trust_env=False
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._http.close()

    def models(self) -> list[str]:
        """Names of what may be asked."""
        return [model["id"] for model in self._request("GET", "/models").json()["data"]]

    def ensure_file(self, name: str, content: bytes) -> tuple[str, bool]:
        """Id of a file with exactly this content, and whether it had to be uploaded."""
        for file in self._request("GET", "/files", params={"purpose": "fine-tune", "limit": 100}).json()["data"]:
            same_size = file["filename"] == name and file["bytes"] == len(content)
            if same_size and self._request("GET", f"/files/{file['id']}/content").content == content:
                return file["id"], False
        uploaded = self._request(
            "POST", "/files", files={"file": (name, content, "application/jsonl")}, data={"purpose": "fine-tune"}
        ).json()
        return uploaded["id"], True

    def submit(self, body: dict[str, Any]) -> dict[str, Any]:
        """A new job."""
        return self._request("POST", "/fine_tuning/jobs", json=body).json()

    def job(self, job_id: str) -> dict[str, Any]:
        """A job as it is now."""
        return self._request("GET", f"/fine_tuning/jobs/{job_id}").json()

    def find_jobs(self, key: str, value: str) -> list[dict[str, Any]]:
        """Jobs that carry this metadata pair, newest first."""
        return self._request("GET", "/fine_tuning/jobs", params={f"metadata[{key}]": value}).json()["data"]

    def events(self, job_id: str) -> list[dict[str, Any]]:
        """The job's last 100 events, oldest first."""
        events = self._request("GET", f"/fine_tuning/jobs/{job_id}/events", params={"limit": 100}).json()["data"]
        return list(reversed(events))

    def cancel(self, job_id: str) -> None:
        """Asks the job to end."""
        self._request("POST", f"/fine_tuning/jobs/{job_id}/cancel")

    def ask_all(self, model: str, conversations: Sequence[Sequence[dict[str, str]]], *, max_tokens: int) -> list[str]:
        """Greedy answers, in order; asked in parallel, so that the engine can batch them."""

        def ask(messages: Sequence[dict[str, str]]) -> str:
            body = {"model": model, "messages": list(messages), "temperature": 0, "max_tokens": max_tokens}
            return self._request("POST", "/chat/completions", json=body).json()["choices"][0]["message"]["content"]

        with ThreadPoolExecutor(PARALLEL_REQUESTS) as pool:
            return list(pool.map(ask, conversations))

    def _request(self, method: str, path: str, **kwargs: Any) -> httpx.Response:
        try:
            answer = self._http.request(method, path, **kwargs)
        except httpx.HTTPError as error:
            raise Unavailable(f"{method} {path}: the API does not answer ({error}); see its log in the data folder.") from error
        if answer.status_code == 401:
            raise NotAuthenticated("The API does not know the demo's key.")
        if answer.is_error:
            try:
                message = answer.json()["error"]["message"]
            except (ValueError, KeyError, TypeError):
                message = answer.text[:300]
            raise RequestRefused(f"{method} {path}: HTTP {answer.status_code}: {message}")
        return answer

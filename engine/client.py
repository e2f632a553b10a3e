"""The verbs over HTTP, as workers and the API call them. Loads no torch.

Every request names its caller: `holder_token` fences out the stale holder of a job, `client_id` with `seq_id` makes a repeated request
the same request, so that a mutating verb whose answer was lost is done once however often it is sent.
"""

import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar, cast

import httpx
import numpy as np

from core import errors
from core.contracts import LoraSettings, OptimizerSettings
from engine import wire
from engine.types import (
    AdapterInfo,
    BaseModelInfo,
    Completion,
    FloatArray,
    ForwardBackwardResult,
    IntArray,
    LossSettings,
    Message,
    OptimResult,
    SampleRequest,
    SavedAdapter,
    StackedOn,
    TrainGroup,
)

T = TypeVar("T")

RETRY_DELAYS_S = (0.1, 0.3, 1.0, 2.0)
"""Pauses before the repeats of a request whose connection broke; long enough to outlive a dropped connection, not an engine's restart."""

_BY_CODE: dict[str, type[errors.EspalierError]] = {
    kind.default_code: kind for kind in (errors.IllegalTransition, errors.LeaseLost, errors.CorruptData)
}
_BY_STATUS: dict[int, type[errors.EspalierError]] = {
    kind.http_status: kind
    for kind in (errors.InvalidInput, errors.NotAuthenticated, errors.Forbidden, errors.NotFound, errors.Conflict, errors.Unavailable)
}


class EngineClient:
    """`engine.types.Verbs` of one engine host. Threads may share it; calls on one adapter must not overlap.

    Args:
        url: the engine host's base URL, `http://host:port`.
        holder_token: fencing token of the job's lease; 0 where no lease stands behind the calls.
        owner: whose share of the engine the calls take, a tenant's id; empty: each adapter counts by itself.
        timeout_s: seconds to wait for one answer, the wait in the engine's queue included.
    """

    def __init__(self, url: str, *, holder_token: int = 0, owner: str = "", timeout_s: float = 1800.0) -> None:
        self._url = url.rstrip("/")
        self._holder_token = holder_token
        self._owner = owner
        self._client_id = uuid.uuid4().hex
        self._seq_ids: dict[str, int] = {}
        self._lock = threading.Lock()
        self._timeout_s = timeout_s
        # The engine host is named by the settings; a proxy of the environment must not stand between.
        self._http = httpx.Client(base_url=self._url, timeout=httpx.Timeout(timeout_s, connect=5.0), trust_env=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Closes the connections."""
        self._http.close()

    def info(self) -> BaseModelInfo:
        """See Verbs."""
        return wire.build(BaseModelInfo, self._call("info", {}))

    def render(self, conversations: Sequence[Sequence[Message]]) -> list[IntArray]:
        """See Verbs.

        Raises:
            InvalidInput: the chat template refuses a conversation; param names it (`conversations[3]`).
        """
        return list(self._call("render", {"conversations": [[dict(m) for m in messages] for messages in conversations]}))

    def render_answers(self, conversations: Sequence[Sequence[Message]]) -> list[IntArray]:
        """See Verbs.

        Raises:
            InvalidInput: as `render`, or the last message is not the assistant's.
        """
        return list(self._call("render_answers", {"conversations": [[dict(m) for m in messages] for messages in conversations]}))

    def create_adapter(
        self, adapter_id: str, lora: LoraSettings, *, seed: int, weights: bytes | None = None, under: StackedOn | None = None
    ) -> AdapterInfo:
        """See Trainer."""
        arguments = {"lora": lora, "seed": seed, "weights": weights, "under": under}
        return wire.build(AdapterInfo, self._mutate("create_adapter", adapter_id, arguments))

    def drop_adapter(self, adapter_id: str) -> None:
        """See Verbs."""
        self._mutate("drop_adapter", adapter_id, {})

    def sync(self, adapter_id: str) -> str:
        """See Rollouts."""
        return str(self._mutate("sync", adapter_id, {}))

    def sample(self, adapter_id: str | None, requests: Sequence[SampleRequest]) -> list[list[Completion]]:
        """See Rollouts. A repeat after a broken connection samples anew, from the same seeds."""
        answer = self._call("sample", {"adapter_id": adapter_id, "requests": list(requests)})
        return [[wire.build(Completion, completion) for completion in completions] for completions in answer]

    def forward(
        self,
        adapter_id: str | None,
        groups: Sequence[TrainGroup],
        *,
        temperature: float,
        reference: bool = False,
        exported: bool = False,
    ) -> tuple[tuple[FloatArray, ...], ...]:
        """See Trainer."""
        which = {"reference": reference, "exported": exported}
        answer = self._call("forward", {"adapter_id": adapter_id, "groups": list(groups), "temperature": temperature, **which})
        return tuple(tuple(np.asarray(logprobs, dtype=np.float32) for logprobs in group) for group in answer)

    def forward_backward(self, adapter_id: str, groups: Sequence[TrainGroup], loss: LossSettings) -> ForwardBackwardResult:
        """See Trainer."""
        return wire.build(ForwardBackwardResult, self._mutate("forward_backward", adapter_id, {"groups": list(groups), "loss": loss}))

    def optim_step(
        self, adapter_id: str, optimizer: OptimizerSettings, *, learning_rate: float, total_steps: int | None = None
    ) -> OptimResult:
        """See Trainer."""
        arguments = {"optimizer": optimizer, "learning_rate": learning_rate, "total_steps": total_steps}
        answer = self._mutate("optim_step", adapter_id, arguments)
        return wire.build(OptimResult, answer)

    def new_phase(self, adapter_id: str) -> AdapterInfo:
        """See Trainer."""
        return wire.build(AdapterInfo, self._mutate("new_phase", adapter_id, {}))

    def save(self, adapter_id: str) -> SavedAdapter:
        """See Trainer."""
        return wire.build(SavedAdapter, self._call("save", {"adapter_id": adapter_id}))

    def save_state(self, adapter_id: str) -> bytes:
        """See Trainer."""
        return cast(bytes, self._call("save_state", {"adapter_id": adapter_id}))

    def load_state(self, adapter_id: str, state: bytes) -> AdapterInfo:
        """See Trainer."""
        return wire.build(AdapterInfo, self._mutate("load_state", adapter_id, {"state": state}))

    def _mutate(self, verb: str, adapter_id: str, arguments: Mapping[str, object]) -> Any:
        with self._lock:
            seq_id = self._seq_ids[adapter_id] = self._seq_ids.get(adapter_id, 0) + 1
        return self._call(verb, {"adapter_id": adapter_id, "seq_id": seq_id, **arguments})

    def _call(self, verb: str, arguments: Mapping[str, object]) -> Any:
        body = wire.pack({"holder_token": self._holder_token, "client_id": self._client_id, "owner": self._owner, **arguments})
        response = self._post(f"/engine/v1/{verb}", body)
        if not response.is_success:
            raise _error_of(response)
        try:
            return wire.unpack(response.content)
        except ValueError as error:
            raise errors.Unavailable(f"{self._url} answered {verb} with a body that is not the engine host's; check the URL.") from error

    def _post(self, path: str, body: bytes) -> httpx.Response:
        for delay_s in (*RETRY_DELAYS_S, None):
            try:
                return self._http.post(path, content=body, headers={"content-type": wire.CONTENT_TYPE})
            except httpx.TimeoutException as error:
                raise errors.Unavailable(f"The engine host at {self._url} gave no answer within {self._timeout_s:g} s.") from error
            except httpx.TransportError as error:
                if delay_s is None:
                    raise errors.Unavailable(f"The engine host at {self._url} does not answer ({error}); is it running?") from error
                time.sleep(delay_s)
        raise AssertionError("the last round returns or raises")


def _error_of(response: httpx.Response) -> errors.EspalierError:
    """The core.errors class that the host raised, out of its status and JSON body."""
    try:
        content: Any = response.json()["error"]
        message, code, param = str(content["message"]), content.get("code"), content.get("param")
    except (ValueError, KeyError, TypeError, AttributeError):
        return errors.Unavailable(f"The engine host answered {response.status_code} without saying why: {response.text[:200]!r}")
    kind = _BY_CODE.get(code) or _BY_STATUS.get(response.status_code, errors.EspalierError)
    return kind(message, param=param, code=code)

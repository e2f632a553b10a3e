"""Inference requests: the fields that pass to a replica, the ones that are accepted and dropped, and no others.

A replica obeys more fields than the OpenAI wire has (chat templates, LoRA paths, cache salts); only those named here are ever sent.
"""

from typing import Annotated, Any, Literal

from pydantic import Field

from core.contracts import Contract

DROPPED = frozenset(
    {"user", "metadata", "store", "service_tier", "prompt_cache_key", "prompt_cache_retention", "safety_identifier", "cache_salt"}
)
"""Accepted so that clients need no change; none reaches a replica. `cache_salt` above all: with another tenant's salt a client could time
that tenant's prefix cache."""

Stop = Annotated[str, Field(max_length=256)]
Tokens = Annotated[list[int], Field(max_length=1_000_000)]


class StreamOptions(Contract):
    """`stream_options`."""

    include_usage: bool = Field(default=False, description="Ends the stream with a chunk that counts tokens.")
    include_obfuscation: bool | None = Field(default=None, description="Accepted, without effect.")


class _Inference(Contract):
    """What both kinds share."""

    model: str = Field(min_length=1, max_length=256, description="The base model, or an adapter of the project.")
    stream: bool | None = Field(default=None, description="Server-sent events instead of one answer.")
    stream_options: StreamOptions | None = None
    max_tokens: int | None = Field(default=None, ge=1, description="Longest completion, in tokens.")
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    n: int | None = Field(default=None, ge=1, le=128, description="Completions.")
    stop: Stop | Annotated[list[Stop], Field(max_length=16)] | None = None
    seed: int | None = None
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    logit_bias: dict[str, float] | None = Field(default=None, max_length=1024)
    top_k: int | None = Field(default=None, ge=-1, description="vLLM's; not OpenAI's.")
    min_p: float | None = Field(default=None, ge=0, le=1, description="vLLM's; not OpenAI's.")
    repetition_penalty: float | None = Field(default=None, gt=0, le=2, description="vLLM's; not OpenAI's.")

    user: str | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    service_tier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None
    cache_salt: str | None = None

    def payload(self) -> dict[str, Any]:
        """What passes on, as the client wrote it; `model`, streaming and the cache salt are the gateway's to set."""
        return self.model_dump(mode="json", exclude_none=True, exclude=set(DROPPED) | {"model", "stream", "stream_options"})


class ChatRequest(_Inference):
    """POST /v1/chat/completions."""

    messages: list[dict[str, Any]] = Field(min_length=1, description="The conversation.")
    max_completion_tokens: int | None = Field(default=None, ge=1, description="Longest completion, in tokens.")
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    response_format: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = Field(default=None, max_length=128)
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None


class CompletionRequest(_Inference):
    """POST /v1/completions."""

    prompt: str | Tokens | Annotated[list[str | Tokens], Field(max_length=256)] = Field(description="Text or token ids, one or several.")
    echo: bool | None = None
    logprobs: int | None = Field(default=None, ge=0, le=20)
    suffix: Literal[None] = Field(default=None, description="Not supported.")
    best_of: int | None = Field(default=None, ge=1, le=128)

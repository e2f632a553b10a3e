"""Requests of the serving routes. What vLLM accepts and has no meaning here is ignored; what would change the answer is refused."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from core.errors import InvalidInput

MAX_CHOICES = 128
TokenId = Annotated[int, Field(strict=True, ge=0)]


class StreamOptions(BaseModel):
    """What a stream carries besides its chunks."""

    model_config = ConfigDict(extra="ignore")

    include_usage: bool = False


class _Generate(BaseModel):
    model_config = ConfigDict(extra="ignore")

    model: str | None = None
    max_tokens: int | None = Field(default=None, ge=1)
    temperature: float | None = Field(default=None, ge=0, le=100)
    top_p: float | None = Field(default=None, gt=0, le=1)
    n: int | None = Field(default=None, ge=1, le=MAX_CHOICES)
    stop: str | list[str] | None = None
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**64)
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    cache_salt: str | None = None
    """Names the tenant (the gateway sets it): shares of the engine are fair between salts."""
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    top_k: int | None = None
    min_p: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    use_beam_search: bool | None = None

    @field_validator("stop")
    @classmethod
    def _stops(cls, value: str | list[str] | None) -> str | list[str] | None:
        if any(not s for s in ([value] if isinstance(value, str) else value or [])):
            raise ValueError("a stop string is empty")
        return value

    @model_validator(mode="after")
    def _refuse_unsupported(self) -> "_Generate":
        neutral: dict[str, tuple[object, ...]] = {
            "presence_penalty": (None, 0.0),
            "frequency_penalty": (None, 0.0),
            "repetition_penalty": (None, 1.0),
            "logit_bias": (None, {}),
            "top_k": (None, 0, -1),
            "min_p": (None, 0.0),
            "min_tokens": (None, 0),
            "ignore_eos": (None, False),
            "use_beam_search": (None, False),
        }
        for field, allowed in neutral.items():
            _refuse_unless(field, getattr(self, field), allowed)
        if self.stream_options is not None and not self.stream:
            raise InvalidInput("stream_options goes with stream=true only.", param="stream_options")
        return self

    @property
    def stops(self) -> tuple[str, ...]:
        """Stop strings."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


class CompletionRequest(_Generate):
    """POST /v1/completions."""

    prompt: str | list[TokenId] | list[str | list[TokenId]]
    logprobs: int | None = Field(default=None, ge=0, le=20)
    echo: bool | None = False
    suffix: str | None = None
    best_of: int | None = None

    @model_validator(mode="after")
    def _refuse_more(self) -> "CompletionRequest":
        _refuse_unless("echo", self.echo, (None, False))
        _refuse_unless("suffix", self.suffix, (None, ""))
        _refuse_unless("best_of", self.best_of, (None, 1, self.n))
        return self


class ChatRequest(_Generate):
    """POST /v1/chat/completions."""

    messages: list[dict[str, Any]] = Field(min_length=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool | None = False
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    tools: list[Any] | None = None
    tool_choice: str | dict[str, Any] | None = None
    functions: list[Any] | None = None
    response_format: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _refuse_more(self) -> "ChatRequest":
        for field in ("tools", "functions"):
            _refuse_unless(field, getattr(self, field), (None, []))
        _refuse_unless("tool_choice", self.tool_choice, (None, "none", "auto"))
        _refuse_unless("response_format", (self.response_format or {}).get("type"), (None, "text"))
        if self.top_logprobs and not self.logprobs:
            raise InvalidInput("top_logprobs goes with logprobs=true only.", param="top_logprobs")
        return self


class LoadLoraRequest(BaseModel):
    """POST /v1/load_lora_adapter."""

    model_config = ConfigDict(extra="ignore")

    lora_name: str
    lora_path: str
    load_inplace: Literal[False] | None = None
    """Names are immutable here: what is loaded under one never changes."""


class UnloadLoraRequest(BaseModel):
    """POST /v1/unload_lora_adapter."""

    model_config = ConfigDict(extra="ignore")

    lora_name: str


def _refuse_unless(field: str, value: object, allowed: tuple[object, ...]) -> None:
    if value not in allowed:
        raise InvalidInput(f"This engine does not support {field}; leave it out.", param=field, code="unsupported_parameter")

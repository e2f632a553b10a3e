"""What the local engine decodes: one prompt with its completions, and the sequences that are live."""

from collections.abc import Callable, Collection, Hashable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from core.errors import InvalidInput
from engine.lora import Adapter
from engine.rollouts.detokeniser import Detokeniser
from engine.rollouts.kv_cache import PromptKv, PromptPlace
from engine.rollouts.sampler import Draw, Row
from engine.types import Completion, FinishReason, IntArray, SamplingParams


@dataclass(frozen=True)
class Piece:
    """One token of one completion, as it is streamed."""

    index: int
    """Which completion of the request."""
    draw: Draw
    text: str
    """Text that is new and final; may be empty while a character or a stop string is open."""
    finish_reason: FinishReason | None


OnPiece = Callable[[Piece], None]


@dataclass(eq=False)
class Generation:
    """One prompt and the completions wanted of it, inside the engine.

    Args:
        owner: whose turn it is: live sequences are shared evenly between owners.
        adapter: by reference; None is the bare base.
        on_piece: called on the compute thread for each token; must not block.
        result: gets the completions in order of params, or the error.
        num_top_logprobs: likeliest tokens wanted beside each sampled one.
        interactive: somebody waits for it; training leaves it more of the time.
    """

    owner: Hashable
    adapter: Adapter | None
    prompt_tokens: IntArray
    params: tuple[SamplingParams, ...]
    on_piece: OnPiece | None = None
    num_top_logprobs: int = 0
    interactive: bool = False
    result: Future[list[Completion]] = field(default_factory=Future[list[Completion]])
    draws: list[list[Draw]] = field(default_factory=list[list[Draw]])
    """Each completion's tokens, also of those that are done."""
    prompt_kv: PromptKv | None = None
    prompt_place: PromptPlace | None = None
    """Where the whole prompt lies once it is computed and shared."""
    first_hidden_H1: Tensor | None = None
    """The prompt's last hidden state, from which the completions' first tokens are sampled."""
    num_admitted: int = 0
    arrival: int = 0
    """Order of submission."""
    completions: dict[int, Completion] = field(default_factory=dict[int, Completion])
    cancelled: bool = False
    """Set from any thread; honoured before the next token."""

    @property
    def share_prompt(self) -> bool:
        """Whether several completions attend to one copy of the prompt's keys and values."""
        return len(self.params) > 1


class LiveSequence:
    """One live completion."""

    def __init__(self, generation: Generation, index: int, tokenizer: Any) -> None:
        self.generation = generation
        self.index = index
        self.params = generation.params[index]
        self.draws: list[Draw] = []
        self.slot = -1
        self.num_own_tokens = 0
        """Tokens in the slot; the last sampled one is not there yet."""
        wants_text = generation.on_piece is not None or bool(self.params.stop)
        self._detokeniser = Detokeniser(tokenizer, self.params.stop) if wants_text else None
        self._tokenizer = tokenizer

    @property
    def position(self) -> int:
        """Position of the last sampled token in prompt and completion together."""
        return len(self.generation.prompt_tokens) + len(self.draws) - 1

    def row(self) -> Row:
        """How the next token is sampled."""
        return Row(self.params.temperature, self.params.top_p, self.params.seed, len(self.draws), self.generation.num_top_logprobs)

    def push(self, draw: Draw, eos_tokens: Collection[int]) -> FinishReason | None:
        """Adds a sampled token, streams it, and says whether the completion ended and why."""
        self.draws.append(draw)
        finish_reason, text = None, ""
        if draw.token in eos_tokens:
            finish_reason = "stop"
        else:
            if self._detokeniser is not None:
                text, stopped = self._detokeniser.push(draw.token)
                finish_reason = "stop" if stopped else None
            if finish_reason is None and len(self.draws) >= self.params.max_tokens:
                finish_reason = "length"
        if finish_reason is not None:
            text += self._finish(finish_reason, ended_by_eos=draw.token in eos_tokens)
        if self.generation.on_piece is not None:
            self.generation.on_piece(Piece(self.index, draw, text, finish_reason))
        return finish_reason

    def _finish(self, finish_reason: FinishReason, *, ended_by_eos: bool) -> str:
        """Stores the completion; returns text that was still held back."""
        tokens = [draw.token for draw in self.draws]
        if self._detokeniser is None:
            rest, kept = "", tokens[:-1] if ended_by_eos else tokens
            text = str(self._tokenizer.decode(kept, skip_special_tokens=True))
        else:
            rest = self._detokeniser.finish()
            text = self._detokeniser.text
        self.generation.draws[self.index] = self.draws
        self.generation.completions[self.index] = Completion(
            tokens=np.array(tokens, dtype=np.int32),
            logprobs=np.array([draw.logprob for draw in self.draws], dtype=np.float32),
            text=text,
            finish_reason=finish_reason,
        )
        return rest


def check_params(params: SamplingParams) -> None:
    """Refuses what can't be sampled.

    Raises:
        InvalidInput: names the field, its value and what is allowed.
    """
    faults = {
        "max_tokens": (params.max_tokens, "at least 1", params.max_tokens >= 1),
        "temperature": (params.temperature, "between 0 and 100", 0 <= params.temperature <= 100),
        "top_p": (params.top_p, "above 0 and at most 1", 0 < params.top_p <= 1),
    }
    for name, (value, allowed, holds) in faults.items():
        if not holds:
            raise InvalidInput(f"{name} is {value}; it must be {allowed}.", param=name)


def check_length(num_prompt_tokens: int, max_tokens: int, max_model_len: int) -> None:
    """Refuses what does not fit the context.

    Raises:
        InvalidInput: with the numbers (code context_length_exceeded).
    """
    if num_prompt_tokens == 0:
        raise InvalidInput("The prompt is empty; it needs at least one token.", param="prompt")
    if num_prompt_tokens + max_tokens > max_model_len:
        raise InvalidInput(
            f"This model's maximum context length is {max_model_len} tokens. However, you requested {num_prompt_tokens + max_tokens} "
            f"tokens ({num_prompt_tokens} in the prompt, {max_tokens} in the completion). Please reduce the length of either one.",
            param="max_tokens", code="context_length_exceeded",
        )  # fmt: skip

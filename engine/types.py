"""Values and protocols of the engine. No torch here: workers and the API import this module.

Dimensions: G completions of a group, T tokens of one sequence.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from core.contracts import LoraSettings, OptimizerSettings

IntArray = NDArray[np.int32]
FloatArray = NDArray[np.float32]
FinishReason = Literal["stop", "length"]
Message = Mapping[str, Any]


@dataclass(frozen=True)
class BaseModelInfo:
    """The base that the engine holds."""

    name: str
    digest: str
    """SHA-256 over its weights files and config, hex."""
    num_layers: int
    vocab_size: int
    max_model_len: int
    """Tokens of prompt and completion together."""
    device: str
    dtype: str
    eos_tokens: tuple[int, ...]
    num_params: int
    """Numbers in the base, embeddings included."""


@dataclass(frozen=True)
class SamplingParams:
    """How one completion is sampled."""

    max_tokens: int
    temperature: float = 1.0
    """0 is greedy; logprobs are then taken at temperature 1."""
    top_p: float = 1.0
    stop: tuple[str, ...] = ()
    seed: int = 0
    """Fixes the completion whatever else is in the batch (up to the numerics of the batch's shape)."""


@dataclass(frozen=True)
class SampleRequest:
    """One prompt and the completions wanted of it, one per params (each with a seed of its own)."""

    prompt_tokens: IntArray
    params: tuple[SamplingParams, ...]


@dataclass(frozen=True)
class Completion:
    """One sampled completion."""

    tokens: IntArray
    """T ids, the EOS that ended it included; a stop string's tokens are kept here (they were sampled) and cut from `text`."""
    logprobs: FloatArray
    """T values, nats, under the sampling policy at the sampling temperature (before top-p)."""
    text: str
    finish_reason: FinishReason


@dataclass(frozen=True)
class TrainGroup:
    """One prompt and its completions: the unit of packing, since the prompt is computed once."""

    prompt_tokens: IntArray
    completions: tuple[IntArray, ...]
    """G arrays of token ids."""
    advantages: FloatArray
    """G values; reward minus group mean, scaled where the algorithm scales. Ignored by `forward`."""
    weights: FloatArray
    """G values; what each token of that completion weighs in the loss's sum (1 / its length, or 1)."""
    old_logprobs: tuple[FloatArray, ...] | None = None
    """Per completion T values under the policy that sampled; None on the first update after a rollout: the policy itself."""
    sampler_logprobs: tuple[FloatArray, ...] | None = None
    """Per completion T values as the rollout engine gave them, for truncated importance sampling; None leaves it out."""
    token_weights: tuple[FloatArray, ...] | None = None
    """Per completion T factors on `weights`, 0 for tokens that are left out; None is 1 throughout."""


LossKind = Literal["clip", "sequence_clip", "cispo", "flow", "sft", "dpo"]


@dataclass(frozen=True)
class LossSettings:
    """The loss of one batch; see `engine.losses`."""

    clip_low: float
    clip_high: float
    beta: float
    denominator: float
    """Number that the weighted sum over tokens is divided by; of the global batch, so micro-batching can't change gradients."""
    temperature: float
    """Sampling temperature; logits are divided by it on both sides."""
    kind: LossKind = "clip"
    """clip: GRPO, Dr. GRPO, DAPO, RLOO; sequence_clip: GSPO; cispo; flow: FlowRL; sft; dpo (groups of chosen and rejected)."""
    entropy_bonus: float = 0.0
    importance_cap: float | None = None
    """Truncates trainer / sampler probability (needs `sampler_logprobs`); rejection is done by `token_weights`."""


@dataclass(frozen=True)
class StackedOn:
    """The adapter under a stacked one."""

    weights: bytes
    """safetensors in PEFT's key names."""
    lora: LoraSettings
    trainable: bool
    """Whether it takes gradients too (its learning rate: `LearningRateGroup` with part "start")."""


@dataclass(frozen=True)
class ForwardBackwardResult:
    """What one forward_backward did; gradients stay in the engine until `optim_step`."""

    loss: float
    num_tokens: int
    """Completion tokens trained on."""
    logprobs: tuple[tuple[FloatArray, ...], ...]
    """Per group, per completion: T logprobs under the current policy at the temperature, nats."""
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    """Token means. Of losses on sampled tokens: ratio, clip_fraction, kl (k3 estimate against the reference, nats; 0 when beta is 0); of
    others see `engine.losses.packed_loss`; of all: entropy (nats)."""


@dataclass(frozen=True)
class OptimResult:
    """What one optimizer step did."""

    step: int
    """Optimizer steps of this adapter so far."""
    grad_norm: float
    """Global L2 norm before clipping."""
    fingerprint: str
    """SHA-256 over the adapter's factors after the step; changes at every step with a non-zero gradient."""


@dataclass(frozen=True)
class AdapterInfo:
    """An adapter as the engine holds it."""

    adapter_id: str
    step: int
    num_params: int
    fingerprint: str


@dataclass(frozen=True)
class SavedAdapter:
    """An adapter in the form that leaves the engine."""

    weights: bytes
    """safetensors, float32, PEFT's key names, sorted keys."""
    config: Mapping[str, Any]
    """PEFT's adapter_config.json as a value."""
    fingerprint: str
    notes: Mapping[str, float] = field(default_factory=dict[str, float])
    """What leaving cost: {"distilled_experts": number} where a mixture left as one adapter. Its KL: `Trainer.forward` with `exported`."""


class PendingOp(Protocol):
    """A training op under way: `Trainer.advance` computes its micro-batches, perhaps together with other ops'."""

    error: BaseException | None
    """Of a micro-batch that failed; the op is given up then."""

    @property
    def done(self) -> bool:
        """Whether nothing is left to compute: it went through, or failed."""
        ...

    def finish(self) -> Any:
        """The op's result, once it is done without an error."""
        ...

    def abort(self, error: BaseException) -> None:
        """Gives it up; gradients are what they were before it."""
        ...


class Trainer(Protocol):
    """Trains adapters over one frozen base. Two exist: torch (one device) and, later, megatron.

    What computes long is an op: begun by one call, then advanced micro-batch by micro-batch, several ops at once. One thread calls them.
    Errors: KeyError-free; an unknown adapter is `core.errors.NotFound` (code adapter_not_loaded), bad shapes `core.errors.InvalidInput`.
    """

    base: BaseModelInfo

    def create_adapter(
        self, adapter_id: str, lora: LoraSettings, *, seed: int, weights: bytes | None = None, under: StackedOn | None = None
    ) -> AdapterInfo:
        """Makes (or replaces) an adapter: fresh (by `seed` and lora.init), from PEFT safetensors `weights`, or fresh over `under`.

        The reference policy is what the policy is at this moment (a frozen copy of `weights` or `under`, else the bare base), so KL at
        step 0 is 0.
        """
        ...

    def drop_adapter(self, adapter_id: str) -> None:
        """Frees its memory; dropping what is not there is no error."""
        ...

    def begin_forward(
        self,
        adapter_id: str | None,
        groups: Sequence[TrainGroup],
        *,
        temperature: float,
        reference: bool = False,
        exported: bool = False,
        owner: Hashable = None,
    ) -> PendingOp:
        """Per-token logprobs without gradients (finishes with tuple[tuple[FloatArray, ...], ...]); None is the bare base.

        Args:
            reference: of the adapter's reference policy instead of its current one.
            exported: of the adapter as `save` gives it, which is another one where a mixture is distilled.
            owner: who shares micro-batches evenly with the owners of other ops.
        """
        ...

    def begin_forward_backward(
        self, adapter_id: str, groups: Sequence[TrainGroup], loss: LossSettings, *, owner: Hashable = None
    ) -> PendingOp:
        """Adds the batch's gradients to the adapter's once it finishes (with ForwardBackwardResult)."""
        ...

    def advance(self, ops: Sequence[Any]) -> None:
        """Computes one micro-batch of pieces of these ops (they are this trainer's own). An op that fails carries its error."""
        ...

    def optim_step(
        self, adapter_id: str, optimizer: OptimizerSettings, *, learning_rate: float, total_steps: int | None = None
    ) -> OptimResult:
        """One AdamW step on the accumulated gradients, clipped; then gradients are zero.

        Args:
            learning_rate: this step's, after multiplier, warm-up and schedule. A learning-rate group's follows in proportion.
            total_steps: of the whole job; a rank budget then settles after its share of them. None: it never does.
        """
        ...

    def new_phase(self, adapter_id: str) -> AdapterInfo:
        """Begins another phase of training, as after a supervised warm-up: the policy as it is now is the reference from here on, so that
        its KL is 0 again, and the optimizer starts anew. Factors and step count stay."""
        ...

    def save(self, adapter_id: str) -> SavedAdapter:
        """The adapter for the registry."""
        ...

    def save_state(self, adapter_id: str) -> bytes:
        """Everything that a resumed run needs: factors, moments, step, the reference's factors, settings (safetensors with metadata)."""
        ...

    def load_state(self, adapter_id: str, state: bytes) -> AdapterInfo:
        """Makes (or replaces) an adapter from `save_state`'s bytes."""
        ...


class Rollouts(Protocol):
    """Samples completions. Two exist: `local` (in the trainer's process, on its weights) and `vllm`."""

    def sync(self, adapter_id: str) -> str:
        """Makes the adapter's current factors the ones sampled from.

        Returns:
            The fingerprint of what the sampler holds. Equal to the trainer's, or the sync failed.
        Raises:
            core.errors.Unavailable: the sampler holds something else, or does not answer.
        """
        ...

    def drop(self, adapter_id: str) -> None:
        """Forgets an adapter; forgetting what is not there is no error."""
        ...

    async def sample(self, adapter_id: str | None, requests: Sequence[SampleRequest], *, owner: Hashable = None) -> list[list[Completion]]:
        """Completions, per request one per params, in order. None samples the bare base.

        Args:
            owner: who shares the sampler evenly with the owners of other calls.
        """
        ...


class Verbs(Protocol):
    """The verbs as a GRPO job calls them: `engine.client.EngineClient` over HTTP, or anything that stands in for it.

    Mutating verbs are idempotent over the wire (a repeated call after a lost answer is done once). Errors are core.errors:
    NotFound (code adapter_not_loaded) when the engine was restarted and lost the adapter, Unavailable when it does not answer,
    LeaseLost when a newer holder of the job has spoken.
    """

    def info(self) -> BaseModelInfo:
        """What the engine holds."""
        ...

    def render(self, conversations: Sequence[Sequence[Message]]) -> list[IntArray]:
        """Token ids of each conversation by the base's chat template, the assistant's turn opened at the end."""
        ...

    def render_answers(self, conversations: Sequence[Sequence[Message]]) -> list[IntArray]:
        """Token ids of each conversation's last message, the assistant's, as they follow `render` of the others; the EOS that ends the
        turn included."""
        ...

    def create_adapter(
        self, adapter_id: str, lora: LoraSettings, *, seed: int, weights: bytes | None = None, under: StackedOn | None = None
    ) -> AdapterInfo:
        """See Trainer."""
        ...

    def drop_adapter(self, adapter_id: str) -> None:
        """Frees it in the trainer and in the rollouts."""
        ...

    def sync(self, adapter_id: str) -> str:
        """See Rollouts; call after create_adapter, load_state and each optim_step, before sample."""
        ...

    def sample(self, adapter_id: str | None, requests: Sequence[SampleRequest]) -> list[list[Completion]]:
        """See Rollouts."""
        ...

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
        ...

    def forward_backward(self, adapter_id: str, groups: Sequence[TrainGroup], loss: LossSettings) -> ForwardBackwardResult:
        """See Trainer."""
        ...

    def optim_step(
        self, adapter_id: str, optimizer: OptimizerSettings, *, learning_rate: float, total_steps: int | None = None
    ) -> OptimResult:
        """See Trainer."""
        ...

    def new_phase(self, adapter_id: str) -> AdapterInfo:
        """See Trainer."""
        ...

    def save(self, adapter_id: str) -> SavedAdapter:
        """See Trainer."""
        ...

    def save_state(self, adapter_id: str) -> bytes:
        """See Trainer."""
        ...

    def load_state(self, adapter_id: str, state: bytes) -> AdapterInfo:
        """See Trainer."""
        ...

"""The torch Trainer: many adapters in training over one frozen base on one device (cpu, cuda or npu).

Dimensions: N rows of a micro-batch, M completion tokens of it, H hidden.
"""

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from core.contracts import LoraSettings, OptimizerSettings
from core.errors import InvalidInput, NotFound
from engine.attention import PackedAttention
from engine.backends.create import new_slot
from engine.backends.optimizer import Slot
from engine.backends.state import slot_from_bytes, slot_to_bytes
from engine.logprobs import token_logprobs
from engine.lora import Adapter, Segment
from engine.losses import grpo_loss
from engine.model import BaseModel
from engine.packing import PackedBatch, check_groups, pack, plan_micro_batches
from engine.peft_export import adapter_config, adapter_weights
from engine.types import (
    AdapterInfo,
    BaseModelInfo,
    FloatArray,
    ForwardBackwardResult,
    LossSettings,
    OptimResult,
    SavedAdapter,
    StackedOn,
    TrainGroup,
)

Logprobs = tuple[tuple[FloatArray, ...], ...]


class TorchTrainer:
    """`engine.types.Trainer` in torch.

    Args:
        micro_batch_tokens: rows of one packed forward and backward; bounds memory, never changes results beyond rounding.
    """

    def __init__(self, model: BaseModel, info: BaseModelInfo, *, micro_batch_tokens: int) -> None:
        self.base = info
        self._model = model
        self._micro_batch_tokens = micro_batch_tokens
        self._slots: dict[str, Slot] = {}

    def create_adapter(
        self, adapter_id: str, lora: LoraSettings, *, seed: int, weights: bytes | None = None, under: StackedOn | None = None
    ) -> AdapterInfo:
        """See `engine.types.Trainer`."""
        self._slots[adapter_id] = new_slot(self._model, lora, seed=seed, weights=weights, under=under)
        return self._info(adapter_id)

    def drop_adapter(self, adapter_id: str) -> None:
        """See `engine.types.Trainer`."""
        self._slots.pop(adapter_id, None)

    def adapter(self, adapter_id: str) -> Adapter:
        """The live adapter, for sampling in this process: its factors change in place at each `optim_step`.

        Raises:
            NotFound: not loaded.
        """
        return self._slot(adapter_id).adapter

    def forward(
        self, adapter_id: str | None, groups: Sequence[TrainGroup], *, temperature: float, reference: bool = False
    ) -> Generator[None, None, Logprobs]:
        """See `engine.types.Trainer`."""
        slot = None if adapter_id is None else self._slot(adapter_id)
        adapter = None if slot is None else slot.reference if reference else slot.adapter
        _check_temperature(temperature)
        collected = _Collected(groups)
        for batch in self._micro_batches(groups, training=False):
            with torch.no_grad():
                logprobs_M, _ = self._logprobs(batch, adapter, temperature)
            collected.add(batch, logprobs_M)
            yield
        return collected.logprobs()

    def forward_backward(
        self, adapter_id: str, groups: Sequence[TrainGroup], loss: LossSettings
    ) -> Generator[None, None, ForwardBackwardResult]:
        """See `engine.types.Trainer`. A call that fails or is abandoned leaves the gradients as they were."""
        slot = self._slot(adapter_id)
        _check_temperature(loss.temperature)
        if not loss.denominator > 0:
            raise InvalidInput(f"denominator is {loss.denominator}; it must be above 0.", param="loss.denominator")
        collected = _Collected(groups)
        with slot.accumulating():
            for batch in self._micro_batches(groups, training=True):
                self._train(slot, batch, loss, collected)
                yield
        return ForwardBackwardResult(collected.loss, collected.num_tokens, collected.logprobs(), collected.means())

    def optim_step(
        self, adapter_id: str, optimizer: OptimizerSettings, *, learning_rate: float, total_steps: int | None = None
    ) -> OptimResult:
        """See `engine.types.Trainer`.

        Raises:
            InvalidInput: the gradient is not finite (code non_finite_gradient); the adapter stays as it was.
        """
        slot = self._slot(adapter_id)
        grad_norm = slot.apply(optimizer, learning_rate, total_steps)
        return OptimResult(slot.step, grad_norm, slot.adapter.fingerprint())

    def save(self, adapter_id: str) -> SavedAdapter:
        """See `engine.types.Trainer`."""
        adapter = self.adapter(adapter_id)
        config = adapter_config(adapter, self.base.name, self._model.layers)
        return SavedAdapter(adapter_weights(adapter), config, adapter.fingerprint())

    def save_state(self, adapter_id: str) -> bytes:
        """See `engine.types.Trainer`."""
        return slot_to_bytes(self._slot(adapter_id), self.base.digest)

    def load_state(self, adapter_id: str, state: bytes) -> AdapterInfo:
        """See `engine.types.Trainer`; errors as `engine.backends.state.slot_from_bytes`."""
        self._slots[adapter_id] = slot_from_bytes(state, self.base.digest, self._model.device.torch)
        return self._info(adapter_id)

    def _train(self, slot: Slot, batch: PackedBatch, loss: LossSettings, collected: "_Collected") -> None:
        groups = collected.groups
        ref_M: Tensor | None = None
        if loss.beta > 0:
            with torch.no_grad():
                ref_M, _ = self._logprobs(batch, slot.reference, loss.temperature)
        logprobs_M, entropies_M = self._logprobs(batch, slot.adapter, loss.temperature, entropy=True)

        def per_token(values: FloatArray, group: int, number: int) -> FloatArray:
            return np.full(len(groups[group].completions[number]), values[number], np.float32)

        def old(group: int, number: int) -> FloatArray:
            values = groups[group].old_logprobs
            return values[number] if values is not None else current[group, number]

        old_M: Tensor | None = None
        if any(groups[piece.group].old_logprobs is not None for piece in batch.pieces):
            current = {(group, number): values for group, number, values in batch.scatter(groups, logprobs_M)}
            old_M = batch.gather(old)
        total, means = grpo_loss(
            logprobs_M, old_M, ref_M, batch.gather(lambda group, number: per_token(groups[group].advantages, group, number)),
            weights_N=batch.gather(lambda group, number: per_token(groups[group].weights, group, number)),
            clip_low=loss.clip_low, clip_high=loss.clip_high, beta=loss.beta, denominator=loss.denominator,
        )  # fmt: skip
        total.backward()
        slot.adapter.micro_batch += 1
        collected.add(batch, logprobs_M, loss=float(total.detach()), means={**means, "entropy": float(entropies_M.mean())})

    def _micro_batches(self, groups: Sequence[TrainGroup], *, training: bool) -> Generator[PackedBatch]:
        check_groups(groups, vocab_size=self.base.vocab_size, max_model_len=self.base.max_model_len, training=training)
        for pieces in plan_micro_batches(groups, self._micro_batch_tokens):
            yield pack(groups, pieces, self._model.device.torch)

    def _logprobs(self, batch: PackedBatch, adapter: Adapter | None, temperature: float, *, entropy: bool = False) -> tuple[Tensor, Tensor]:
        attention = PackedAttention(batch.spans, self._model.device.torch)
        hidden_NH = self._model.hidden(batch.tokens_N, batch.positions_N, attention, (Segment(0, len(batch.tokens_N), adapter),))
        hidden_MH = hidden_NH[batch.predictors_M]
        return token_logprobs(hidden_MH, self._model.lm_head_VH, batch.targets_M, temperature=temperature, entropy=entropy)

    def _slot(self, adapter_id: str) -> Slot:
        if adapter_id not in self._slots:
            raise NotFound(
                f"Adapter {adapter_id} is not loaded in this engine; create it or load its state first.", code="adapter_not_loaded"
            )
        return self._slots[adapter_id]

    def _info(self, adapter_id: str) -> AdapterInfo:
        slot = self._slot(adapter_id)
        return AdapterInfo(adapter_id, slot.step, slot.num_params, slot.adapter.fingerprint())


@dataclass
class _Collected:
    """What the micro-batches of one call gave so far."""

    groups: Sequence[TrainGroup]
    loss: float = 0.0
    num_tokens: int = 0
    _sums: dict[str, float] = field(default_factory=lambda: dict.fromkeys(("ratio", "clip_fraction", "kl", "entropy"), 0.0))
    _found: dict[tuple[int, int], FloatArray] = field(default_factory=dict[tuple[int, int], FloatArray])

    def add(self, batch: PackedBatch, logprobs_M: Tensor, *, loss: float = 0.0, means: dict[str, Any] | None = None) -> None:
        count = len(batch.targets_M)
        self.loss += loss
        self.num_tokens += count
        for name, mean in (means or {}).items():
            self._sums[name] += float(mean) * count
        for group, number, values in batch.scatter(self.groups, logprobs_M):
            self._found[group, number] = values

    def logprobs(self) -> Logprobs:
        empty = np.zeros(0, np.float32)
        return tuple(
            tuple(self._found.get((index, number), empty) for number in range(len(group.completions)))
            for index, group in enumerate(self.groups)
        )

    def means(self) -> dict[str, float]:
        """Token means; all 0 without tokens."""
        return {name: total / max(1, self.num_tokens) for name, total in self._sums.items()}


def _check_temperature(temperature: float) -> None:
    if not temperature > 0:
        raise InvalidInput(f"temperature is {temperature}; logprobs need one above 0 (greedy is scored at 1).", param="temperature")

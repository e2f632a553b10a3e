"""The torch Trainer: many adapters in training over one frozen base on one device (cpu, cuda or npu).

Dimensions: N rows of a micro-batch, M completion tokens of it, H hidden.
"""

from collections.abc import Generator, Hashable, Sequence
from typing import cast

import numpy as np
import torch
from torch import Tensor

from core.contracts import LoraSettings, OptimizerSettings
from core.errors import InvalidInput
from engine.attention import PackedAttention
from engine.backends.create import new_slot
from engine.backends.ops import Chosen, FairShare, Logprobs, PendingOp
from engine.backends.optimizer import Slot
from engine.backends.pool import SlotPool
from engine.backends.state import slot_from_bytes, slot_to_bytes
from engine.logprobs import token_logprobs
from engine.lora import Adapter, Segment
from engine.losses import LossInputs, check_loss, packed_loss
from engine.model import BaseModel
from engine.packing import PackedBatch, Piece, check_groups, pack, rows_of
from engine.peft_export import adapter_config, adapter_weights, export_notes
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


class TorchTrainer:
    """`engine.types.Trainer` in torch.

    Args:
        micro_batch_tokens: rows of one packed forward and backward; bounds memory, never changes results beyond rounding.
        mixed: whether one micro-batch holds several ops. Without, an op's results depend on nothing but itself, to the last bit.
        max_resident: adapters on the device at once; the others page to host memory and back.
    """

    def __init__(
        self, model: BaseModel, info: BaseModelInfo, *, micro_batch_tokens: int, mixed: bool = True, max_resident: int = 64
    ) -> None:
        self.base = info
        self._model = model
        self._micro_batch_tokens = micro_batch_tokens
        self._mixed = mixed
        self._shares = FairShare()
        self._slots = SlotPool(model.device.torch, max_resident)

    def create_adapter(
        self, adapter_id: str, lora: LoraSettings, *, seed: int, weights: bytes | None = None, under: StackedOn | None = None
    ) -> AdapterInfo:
        """See `engine.types.Trainer`."""
        self._slots.put(adapter_id, new_slot(self._model, lora, seed=seed, weights=weights, under=under))
        return self._info(adapter_id)

    def drop_adapter(self, adapter_id: str) -> None:
        """See `engine.types.Trainer`."""
        self._slots.drop(adapter_id)

    def adapter(self, adapter_id: str) -> Adapter:
        """The live adapter, for sampling in this process: its factors change in place at each `optim_step`.

        Raises:
            NotFound: not loaded.
        """
        return self.slot(adapter_id).adapter

    @property
    def num_moves(self) -> int:
        """Times that an adapter was paged out or in."""
        return self._slots.num_moves

    def slot(self, adapter_id: str) -> Slot:
        """The adapter with all that is trained of it, on the device.

        Raises:
            NotFound: not loaded.
        """
        return self._slots.get(adapter_id)

    def forward(
        self,
        adapter_id: str | None,
        groups: Sequence[TrainGroup],
        *,
        temperature: float,
        reference: bool = False,
        exported: bool = False,
    ) -> Generator[None, None, Logprobs]:
        """One forward by itself, for callers without a compute thread: yields between micro-batches."""
        op = self.begin_forward(adapter_id, groups, temperature=temperature, reference=reference, exported=exported)
        while not op.done:
            self.advance([op])
            yield
        return cast(Logprobs, op.finish())

    def forward_backward(
        self, adapter_id: str, groups: Sequence[TrainGroup], loss: LossSettings
    ) -> Generator[None, None, ForwardBackwardResult]:
        """One forward_backward by itself; one that fails or is abandoned leaves the gradients as they were."""
        op = self.begin_forward_backward(adapter_id, groups, loss)
        return cast(ForwardBackwardResult, (yield from self._alone(op)))

    def _alone(self, op: PendingOp) -> Generator[None, None, object]:
        try:
            while not op.done:
                self.advance([op])
                yield
        except BaseException as error:
            op.abort(error)
            raise
        if op.error is not None:
            raise op.error
        return op.finish()

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
        """See `engine.types.Trainer`."""
        slot = None if adapter_id is None else self.slot(adapter_id)
        adapter = None if slot is None else slot.policy(reference=reference, exported=exported)
        _check_temperature(temperature)
        self._check(groups, training=False)
        return PendingOp(owner, groups, temperature, adapter, slot).plan(self._micro_batch_tokens)

    def begin_forward_backward(
        self, adapter_id: str, groups: Sequence[TrainGroup], loss: LossSettings, *, owner: Hashable = None
    ) -> PendingOp:
        """See `engine.types.Trainer`."""
        slot = self.slot(adapter_id)
        _check_temperature(loss.temperature)
        self._check(groups, training=True)
        check_loss(groups, loss)
        return PendingOp(owner, groups, loss.temperature, slot.adapter, slot, loss).plan(self._micro_batch_tokens)

    def advance(self, ops: Sequence[PendingOp]) -> None:
        """See `engine.types.Trainer`."""
        forwards = [op for op in ops if op.loss is None and not op.done]
        # Forwards first: they are short, and what waits for them has nothing else to do.
        chosen = self._shares.choose(forwards or ops, self._micro_batch_tokens, mixed=self._mixed)
        try:
            if forwards:
                found = self._without_gradients(chosen, [op.adapter for op, _ in chosen])
                for (op, pieces), logprobs_M in zip(chosen, found, strict=True):
                    op.add(pieces, logprobs_M)
            elif chosen:
                self._train(chosen)
        except Exception as error:  # noqa: BLE001 - it is the error of the ops in this batch; others go on
            for op, _ in chosen:
                op.abort(error)

    def optim_step(
        self, adapter_id: str, optimizer: OptimizerSettings, *, learning_rate: float, total_steps: int | None = None
    ) -> OptimResult:
        """See `engine.types.Trainer`.

        Raises:
            InvalidInput: the gradient is not finite (code non_finite_gradient); the adapter stays as it was.
        """
        slot = self.slot(adapter_id)
        grad_norm = slot.apply(optimizer, learning_rate, total_steps)
        return OptimResult(slot.step, grad_norm, slot.adapter.fingerprint())

    def new_phase(self, adapter_id: str) -> AdapterInfo:
        """See `engine.types.Trainer`."""
        self.slot(adapter_id).new_phase()
        return self._info(adapter_id)

    def save(self, adapter_id: str) -> SavedAdapter:
        """See `engine.types.Trainer`."""
        adapter = self.adapter(adapter_id)
        config = adapter_config(adapter, self.base.name, self._model.layers)
        return SavedAdapter(adapter_weights(adapter), config, adapter.fingerprint(), export_notes(adapter))

    def save_state(self, adapter_id: str) -> bytes:
        """See `engine.types.Trainer`."""
        return slot_to_bytes(self.slot(adapter_id), self.base.digest)

    def load_state(self, adapter_id: str, state: bytes) -> AdapterInfo:
        """See `engine.types.Trainer`; errors as `engine.backends.state.slot_from_bytes`."""
        self._slots.put(adapter_id, slot_from_bytes(state, self.base.digest, self._model.device.torch))
        return self._info(adapter_id)

    def _train(self, chosen: Chosen) -> None:
        """One packed forward and backward for all of them; each op's gradients go to its own factors."""
        for op, _ in chosen:
            op.open()
        references = self._references(chosen)
        batch, spans = self._packed(chosen)
        segments = [
            Segment(rows.start, rows.stop, op.adapter, _ordinals(op, pieces)) for (op, pieces), rows in zip(chosen, spans, strict=True)
        ]
        # Inside, since layers that are computed again in the backward ask for segments and attention again.
        attention = PackedAttention(batch.spans, self._model.device.torch)
        with self._model.computing(attention, segments):
            hidden_NH = self._model.hidden(batch.tokens_N, batch.positions_N, attention, segments)
            losses: list[Tensor] = []
            results: list[tuple[Tensor, dict[str, float]]] = []
            start = 0
            for op, pieces in chosen:
                stop = start + sum(op.lengths(pieces))
                inputs = self._inputs(
                    op, pieces, hidden_NH[batch.predictors_M[start:stop]], batch.targets_M[start:stop], references.get(op)
                )
                assert op.loss is not None
                loss, means = packed_loss(inputs, op.loss)
                losses.append(loss)
                results.append((inputs.logprobs_N, means))
                start = stop
            torch.stack(losses).sum().backward()
        for (op, pieces), loss, (logprobs_M, means) in zip(chosen, losses, results, strict=True):
            assert op.slot is not None
            op.slot.adapter.micro_batch += len(pieces)
            op.add(pieces, logprobs_M, loss=float(loss.detach()), means=means)

    def _inputs(self, op: PendingOp, pieces: Sequence[Piece], hidden_MH: Tensor, targets_M: Tensor, ref_M: Tensor | None) -> LossInputs:
        loss, device = op.loss, self._model.device.torch
        assert loss is not None
        logprobs_M, entropies_M = token_logprobs(
            hidden_MH, self._model.lm_head_VH, targets_M, temperature=op.temperature, entropy=True, entropy_gradient=loss.entropy_bonus > 0
        )

        def optional(name: str, otherwise_M: Tensor | None = None) -> Tensor | None:
            """What the groups bring; where some bring none, their tokens get `otherwise`."""
            if all(getattr(op.groups[piece.group], name) is None for piece in pieces):
                return None

            def values(group: TrainGroup, number: int) -> FloatArray:
                given = getattr(group, name)
                return np.full(len(group.completions[number]), np.nan, np.float32) if given is None else given[number]

            values_M = op.per_token(pieces, values, device)
            return values_M if otherwise_M is None else torch.where(values_M.isnan(), otherwise_M, values_M)

        current_M = logprobs_M.detach()
        weights_M = op.per_token(pieces, lambda group, number: _repeated(group, number, group.weights), device)
        token_weights_M = optional("token_weights", torch.ones_like(current_M))
        return LossInputs(
            logprobs_N=logprobs_M,
            old_N=optional("old_logprobs", current_M),
            ref_N=ref_M,
            sampler_N=optional("sampler_logprobs", current_M),
            advantages_N=op.per_token(pieces, lambda group, number: _repeated(group, number, group.advantages), device),
            weights_N=weights_M if token_weights_M is None else weights_M * token_weights_M,
            entropies_N=entropies_M,
            lengths=op.lengths(pieces),
        )

    def _references(self, chosen: Chosen) -> dict[PendingOp, Tensor]:
        """Logprobs under the reference policies of the ops whose losses need them: one pass for all of them."""
        needing = [(op, pieces) for op, pieces in chosen if op.loss is not None and (op.loss.beta > 0 or op.loss.kind == "dpo")]
        if not needing:
            return {}
        adapters = [op.slot.reference if op.slot is not None else None for op, _ in needing]
        return {op: ref_M for (op, _), ref_M in zip(needing, self._without_gradients(needing, adapters), strict=True)}

    def _without_gradients(self, chosen: Chosen, adapters: Sequence[Adapter | None]) -> list[Tensor]:
        """Logprobs [M] of each, every one under its own adapter, in one packed pass."""
        batch, spans = self._packed(chosen)
        segments = [Segment(rows.start, rows.stop, adapter) for adapter, rows in zip(adapters, spans, strict=True)]
        found: list[Tensor] = []
        with torch.no_grad():
            attention = PackedAttention(batch.spans, self._model.device.torch)
            hidden_NH = self._model.hidden(batch.tokens_N, batch.positions_N, attention, segments)
            start = 0
            for op, pieces in chosen:
                stop = start + sum(op.lengths(pieces))
                hidden_MH = hidden_NH[batch.predictors_M[start:stop]]
                targets_M = batch.targets_M[start:stop]
                found.append(token_logprobs(hidden_MH, self._model.lm_head_VH, targets_M, temperature=op.temperature)[0])
                start = stop
        return found

    def _packed(self, chosen: Chosen) -> tuple[PackedBatch, list[range]]:
        """All pieces in one batch, and the rows of each op."""
        groups = [op.groups[piece.group] for op, pieces in chosen for piece in pieces]
        pieces = [piece for _, pieces in chosen for piece in pieces]
        spans: list[range] = []
        start = 0
        for op, own in chosen:
            stop = start + sum(rows_of(op.groups[piece.group], piece.completions) for piece in own)
            spans.append(range(start, stop))
            start = stop
        renumbered = [Piece(index, piece.completions) for index, piece in enumerate(pieces)]
        return pack(groups, renumbered, self._model.device.torch), spans

    def _check(self, groups: Sequence[TrainGroup], *, training: bool) -> None:
        check_groups(groups, vocab_size=self.base.vocab_size, max_model_len=self.base.max_model_len, training=training)

    def _info(self, adapter_id: str) -> AdapterInfo:
        slot = self.slot(adapter_id)
        return AdapterInfo(adapter_id, slot.step, slot.num_params, slot.adapter.fingerprint())


def _ordinals(op: PendingOp, pieces: Sequence[Piece]) -> tuple[tuple[int, int], ...]:
    """(number since the last step, rows) of each piece: what a dropout mask depends on, whoever else is in the batch."""
    first = op.adapter.micro_batch if op.adapter is not None else 0
    return tuple((first + i, rows_of(op.groups[piece.group], piece.completions)) for i, piece in enumerate(pieces))


def _repeated(group: TrainGroup, number: int, values: FloatArray) -> FloatArray:
    return np.full(len(group.completions[number]), values[number], np.float32)


def _check_temperature(temperature: float) -> None:
    if not temperature > 0:
        raise InvalidInput(f"temperature is {temperature}; logprobs need one above 0 (greedy is scored at 1).", param="temperature")

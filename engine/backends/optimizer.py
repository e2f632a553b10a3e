"""One adapter in training: factors, accumulated gradients, AdamW state, step count and frozen reference. Nothing is shared with another."""

import copy
import math
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from core.contracts import LearningRateGroup, OptimizerSettings
from core.errors import InvalidInput
from engine.lora import Adapter, Factors, Named
from engine.ranks import RankAllocator

GATE_MEAN_DECAY = 0.9
"""Of the running mean of a mixture's gates: about the last ten steps, since the policy, and with it the gates, moves on."""


class Slot:
    """An adapter whose trainable tensors take gradients.

    Args:
        adapter: its trainable tensors become autograd leaves.
        reference: the frozen adapter that is the reference policy; None is the bare base.
        importance: of a saved rank budget, see `engine.ranks`.
    Raises:
        InvalidInput: the adapter has nothing to train.
    """

    def __init__(self, adapter: Adapter, reference: Adapter | None, importance: Mapping[str, Tensor] | None = None) -> None:
        self.adapter = adapter
        self.reference = reference
        self.trained = [named for named in adapter.named() if named.trainable]
        self.parameters = [named.tensor for named in self.trained]
        if not self.parameters:
            raise InvalidInput("None of target_modules is a layer of the base; name layers that it has.", param="lora.target_modules")
        for parameter in self.parameters:
            parameter.requires_grad_()
        self.ranks = RankAllocator(adapter, importance) if adapter.settings.rank_budget is not None else None
        self.num_users = 0
        """Ops and rollouts under way with it; it stays on the device meanwhile."""
        # Its learning rate and the like are the job's and come with each step.
        self._adamw = torch.optim.AdamW(self.parameters, foreach=True)

    @property
    def step(self) -> int:
        """Optimizer steps so far."""
        return self.adapter.step

    @property
    def num_params(self) -> int:
        """Numbers that are trained."""
        return sum(parameter.numel() for parameter in self.parameters)

    def policy(self, *, reference: bool = False, exported: bool = False) -> Adapter | None:
        """The adapter whose logprobs are wanted: the current one, the reference (None: the bare base), or what `save` makes of it."""
        if reference:
            return self.reference
        return self.adapter.plain() if exported else self.adapter

    @contextmanager
    def accumulating(self) -> Generator[None]:
        """Adds what the body accumulates to the gradients that were there; a body that fails or is abandoned adds nothing."""
        before = [parameter.grad for parameter in self.parameters]
        micro_batch, counts = self.adapter.micro_batch, [(gate.sum_E, gate.num_rows) for gate in self.adapter.gates()]
        for parameter in self.parameters:
            parameter.grad = None
        try:
            yield
        except BaseException:
            for parameter, grad in zip(self.parameters, before, strict=True):
                parameter.grad = grad
            self.adapter.micro_batch = micro_batch
            for gate, (sum_E, num_rows) in zip(self.adapter.gates(), counts, strict=True):
                gate.sum_E, gate.num_rows = sum_E, num_rows
            raise
        for parameter, grad in zip(self.parameters, before, strict=True):
            if grad is not None:
                parameter.grad = grad if parameter.grad is None else grad + parameter.grad

    def apply(self, optimizer: OptimizerSettings, learning_rate: float, total_steps: int | None = None) -> float:
        """One AdamW step on the clipped gradients (zero where nothing was accumulated), which are gone afterwards.

        Args:
            learning_rate: this step's; a group's follows in proportion. Groups at 0 are left out of everything: step, clipping, moments.
            total_steps: of the whole job, for a rank budget.
        Returns:
            The gradients' global L2 norm before clipping.
        Raises:
            InvalidInput: the norm is not finite; the gradients are dropped and the factors stay as they were.
        """
        rates = self._rates(optimizer, learning_rate)
        for parameter in self.parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        found = None if self.ranks is None else self.ranks.measure(learning_rate)
        live = [parameter for parameters in rates.values() for parameter in parameters]
        norm = float(torch.nn.utils.clip_grad_norm_(live, optimizer.max_grad_norm, foreach=True))
        if not math.isfinite(norm + sum(float(value_R.sum()) for value_R in (found or {}).values())):
            self._forget_gradients()
            raise InvalidInput(
                f"The gradient's norm is {norm} at step {self.step + 1}, so no step was taken; lower the learning rate.",
                param="optimizer.learning_rate",
                code="non_finite_gradient",
            )
        common: dict[str, Any] = {"betas": (optimizer.beta1, optimizer.beta2), "eps": optimizer.eps, "weight_decay": optimizer.weight_decay}
        self._adamw.param_groups = [
            {**self._adamw.defaults, **common, "lr": rate, "params": parameters} for rate, parameters in rates.items()
        ]
        self.adapter.step += 1
        if self.ranks is None or found is None:
            self._adamw.step()
        else:
            with self.ranks.holding():
                self._adamw.step()
            self.ranks.advance(found, step=self.step, total_steps=total_steps, state_of=lambda tensor: self._adamw.state[tensor])
        for gate in self.adapter.gates():
            gate.fold(GATE_MEAN_DECAY)
        self.adapter.micro_batch = 0
        self._forget_gradients()
        self.adapter.changed()
        return norm

    def new_phase(self) -> None:
        """The adapter as it is now becomes the reference, and AdamW forgets its moments."""
        self.reference = frozen_copy(self.adapter)
        self._adamw.state.clear()

    def moments(self) -> dict[str, tuple[Tensor, Tensor, float]]:
        """AdamW's running means of the gradient and its square and its step count, by label; without those that took no step yet."""
        states = {named.label: self._adamw.state[named.tensor] for named in self.trained if named.tensor in self._adamw.state}
        return {label: (state["exp_avg"], state["exp_avg_sq"], float(state["step"])) for label, state in states.items() if state}

    def restore(self, moments: Mapping[str, tuple[Tensor, Tensor, float]]) -> None:
        """Puts back what `moments` gave."""
        for named in self.trained:
            if named.label in moments:
                mean, square, steps = moments[named.label]
                self._adamw.state[named.tensor] = {"step": torch.tensor(float(steps)), "exp_avg": mean, "exp_avg_sq": square}

    def move(self, device: torch.device) -> None:
        """Takes everything of the slot to another device, bit for bit; its tensors stay the objects that they are."""
        for adapter in [self.adapter] if self.reference is None else [self.adapter, self.reference]:
            for named in adapter.named():
                named.tensor.data = named.tensor.data.to(device, copy=True)
            for part in (part for parts in adapter.factors.values() for part in parts):
                part.active_R = None if part.active_R is None else part.active_R.to(device)
                if part.gate is not None:
                    part.gate.mean_E, part.gate.sum_E = part.gate.mean_E.to(device), part.gate.sum_E.to(device)
            adapter.changed()
        for parameter in self.parameters:
            if parameter.grad is not None:
                parameter.grad = parameter.grad.to(device, copy=True)
            for key, value in self._adamw.state.get(parameter, {}).items():
                if key != "step":
                    self._adamw.state[parameter][key] = value.to(device, copy=True)
        if self.ranks is not None:
            self.ranks.importance = {name: value_R.to(device) for name, value_R in self.ranks.importance.items()}

    def _rates(self, optimizer: OptimizerSettings, learning_rate: float) -> dict[float, list[Tensor]]:
        """Trained tensors by this step's learning rate, without those of groups at 0."""
        if not optimizer.learning_rate_groups:
            return {learning_rate: self.parameters}
        rates: dict[float, list[Tensor]] = {}
        for named in self.trained:
            group = next((group for group in optimizer.learning_rate_groups if _matches(group, named)), None)
            if group is None:
                rates.setdefault(learning_rate, []).append(named.tensor)
            elif group.learning_rate > 0:
                rates.setdefault(group.learning_rate / optimizer.learning_rate * learning_rate, []).append(named.tensor)
        return rates

    def _forget_gradients(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None


def frozen_copy(adapter: Adapter) -> Adapter:
    """The adapter's values at this moment, without gradients; what is frozen already is shared, not copied."""

    def frozen(part: Factors) -> Factors:
        if not part.trainable:
            return part
        gate = part.gate and replace(part.gate, weight_EI=part.gate.weight_EI.detach().clone())
        # A rank budget's idle components are 0 in B already; which they are now is no matter of the copy.
        return replace(
            part, a_RI=part.a_RI.detach().clone(), b_OR=part.b_OR.detach().clone(), trainable=False, active_R=None, gate=gate
        )  # fmt: skip

    factors = {name: tuple(frozen(part) for part in parts) for name, parts in adapter.factors.items()}
    dense = {name: d_OI.detach().clone() for name, d_OI in adapter.dense.items()}
    return Adapter(copy.deepcopy(adapter.settings), factors, dense)


def _matches(group: LearningRateGroup, named: Named) -> bool:
    number, module = int(named.layer.split(".")[1]), named.layer.rsplit(".", 1)[-1]
    return (
        (not group.target_modules or module in group.target_modules)
        and group.first_layer <= number
        and (group.last_layer is None or number <= group.last_layer)
        and group.part in ("any", named.part)
    )

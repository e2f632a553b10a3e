"""One adapter in training: factors, accumulated gradients, AdamW state, step count and frozen reference. Nothing is shared with another."""

import copy
from collections.abc import Generator
from contextlib import contextmanager

import torch
from torch import Tensor

from core.contracts import OptimizerSettings
from core.errors import InvalidInput
from engine.lora import Adapter, Factors


class Slot:
    """An adapter whose factors take gradients.

    Args:
        adapter: its factors become autograd leaves.
        reference: the frozen adapter that is the reference policy; None is the bare base.
    """

    def __init__(self, adapter: Adapter, reference: Adapter | None) -> None:
        self.adapter = adapter
        self.reference = reference
        self.step = 0
        self.parameters = list(adapter.parameters())
        for parameter in self.parameters:
            parameter.requires_grad_()
        # Its learning rate and the like are the job's and come with each step.
        self._adamw = torch.optim.AdamW(self.parameters, foreach=True)

    @property
    def num_params(self) -> int:
        """Numbers in all factors."""
        return sum(parameter.numel() for parameter in self.parameters)

    @contextmanager
    def accumulating(self) -> Generator[None]:
        """Adds what the body accumulates to the gradients that were there; a body that fails or is abandoned adds nothing."""
        before = [parameter.grad for parameter in self.parameters]
        self._adamw.zero_grad(set_to_none=True)
        try:
            yield
        except BaseException:
            for parameter, grad in zip(self.parameters, before, strict=True):
                parameter.grad = grad
            raise
        for parameter, grad in zip(self.parameters, before, strict=True):
            if grad is not None:
                parameter.grad = grad if parameter.grad is None else grad + parameter.grad

    def apply(self, optimizer: OptimizerSettings, learning_rate: float) -> float:
        """One AdamW step on the clipped gradients (zero where nothing was accumulated), which are gone afterwards.

        Returns:
            The gradients' global L2 norm before clipping.
        Raises:
            InvalidInput: the norm is not finite; the gradients are dropped and the factors stay as they were.
        """
        for parameter in self.parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        norm = float(torch.nn.utils.clip_grad_norm_(self.parameters, optimizer.max_grad_norm, foreach=True))
        if norm != norm or norm == float("inf"):
            self._adamw.zero_grad(set_to_none=True)
            raise InvalidInput(
                f"The gradient's norm is {norm} at step {self.step + 1}, so no step was taken; lower the learning rate.",
                param="optimizer.learning_rate",
                code="non_finite_gradient",
            )
        for group in self._adamw.param_groups:
            group.update(lr=learning_rate, betas=(optimizer.beta1, optimizer.beta2), eps=optimizer.eps, weight_decay=optimizer.weight_decay)
        self._adamw.step()
        self._adamw.zero_grad(set_to_none=True)
        self.step += 1
        self.adapter.changed()
        return norm

    def moments(self) -> list[tuple[Tensor, Tensor]]:
        """AdamW's running means of the gradient and its square, per parameter; empty before the first step."""
        return [(state["exp_avg"], state["exp_avg_sq"]) for state in (self._adamw.state[p] for p in self.parameters) if state]

    def restore(self, step: int, moments: list[tuple[Tensor, Tensor]]) -> None:
        """Puts back what `step` and `moments` gave."""
        self.step = step
        for parameter, (mean, square) in zip(self.parameters, moments, strict=bool(moments)):
            self._adamw.state[parameter] = {"step": torch.tensor(float(step)), "exp_avg": mean, "exp_avg_sq": square}


def frozen_copy(adapter: Adapter) -> Adapter:
    """The adapter's values at this moment, without gradients."""
    return Adapter(
        copy.deepcopy(adapter.settings),
        {name: Factors(pair.a_RI.detach().clone(), pair.b_OR.detach().clone()) for name, pair in adapter.factors.items()},
    )

"""Ranks that move between layers during training, within a budget.

In the manner of AdaLoRA (Zhang et al. 2023, arXiv:2303.10512): every layer holds as many components (a row of A with its column of B) as
it may have at most, a global budget of them is active, and every few steps the components with the highest smoothed importance become
the active ones. Departures: the parametrisation is plain B A, so that the result is a plain adapter (no singular values, no orthogonality
term); a component's importance is sum over o of (|B_o| + lr) * |dL/dB_o|, in nats: to first order, what taking it out would change the
loss by (eq. 8's sensitivity) and what one step of Adam on it would gain, so that components at zero can come back; it is smoothed by eq. 9
without the uncertainty of eq. 10; the budget is constant instead of shrinking.
R components of a layer.
"""

from collections.abc import Callable, Generator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from core.contracts import LoraSettings
from engine.lora import Adapter, Factors

SMOOTHING = 0.85
"""AdaLoRA's beta_1 (its appendix, table 9: 0.85 throughout)."""


def budget_of(settings: LoraSettings, num_layers: int) -> int:
    """Active components of all layers together."""
    assert settings.rank_budget is not None
    return max(1, round(settings.rank_budget.mean_rank * num_layers))


def first_choice(ranks: Sequence[int], budget: int) -> list[list[bool]]:
    """An even start: the first component of every layer, then the second of every layer, until the budget is spent.

    Args:
        ranks: components of each layer.
    """
    order = sorted((component, layer) for layer, rank in enumerate(ranks) for component in range(rank))
    chosen = set(order[:budget])
    return [[(component, layer) in chosen for component in range(rank)] for layer, rank in enumerate(ranks)]


def choose(importance: Sequence[Sequence[float]], active: Sequence[Sequence[bool]], budget: int) -> list[list[bool]]:
    """The most important components over all layers; what is active stays where importances are equal."""
    order = sorted(
        (-value, not active[layer][component], component, layer)
        for layer, values in enumerate(importance)
        for component, value in enumerate(values)
    )
    chosen = {(layer, component) for _, _, component, layer in order[:budget]}
    return [[(layer, component) in chosen for component in range(len(values))] for layer, values in enumerate(importance)]


class RankAllocator:
    """The budget of one adapter: which components of its "new" parts are active.

    Args:
        importance: smoothed importances by layer, [R] float32, of a saved state; None begins evenly.
    """

    def __init__(self, adapter: Adapter, importance: Mapping[str, Tensor] | None = None) -> None:
        assert adapter.settings.rank_budget is not None
        self._settings = adapter.settings.rank_budget
        self._parts: dict[str, Factors] = {
            name: part for name in sorted(adapter.factors) for part in adapter.factors[name] if part.label == "new"
        }
        self._budget = budget_of(adapter.settings, len(self._parts))
        if importance is None:
            chosen = first_choice([len(part.a_RI) for part in self._parts.values()], self._budget)
            for part, mask in zip(self._parts.values(), chosen, strict=True):
                part.active_R = torch.tensor(mask, device=part.a_RI.device)
            importance = {name: torch.zeros(len(part.a_RI), device=part.a_RI.device) for name, part in self._parts.items()}
        self.importance = dict(importance)

    def measure(self, learning_rate: float) -> dict[str, Tensor]:
        """Importances by this step's accumulated gradients, [R] each, nats. Then hides the gradients of what is not active."""
        found: dict[str, Tensor] = {}
        for name, part in self._parts.items():
            grad_OR = part.b_OR.grad
            assert grad_OR is not None, "gradients are zero rather than absent by now"
            found[name] = ((part.b_OR.detach().abs() + learning_rate) * grad_OR.abs()).sum(0)
            assert part.a_RI.grad is not None
            part.a_RI.grad[self._idle(part)] = 0
            grad_OR[:, self._idle(part)] = 0
        return found

    @contextmanager
    def holding(self) -> Generator[None]:
        """Keeps idle components where they are through an optimizer step, weight decay included."""
        before = {name: part.a_RI.detach()[self._idle(part)].clone() for name, part in self._parts.items()}
        yield
        with torch.no_grad():
            for name, part in self._parts.items():
                part.a_RI[self._idle(part)] = before[name]

    def advance(
        self, found: Mapping[str, Tensor], *, step: int, total_steps: int | None, state_of: Callable[[Tensor], MutableMapping[str, Tensor]]
    ) -> None:
        """Smooths `measure`'s result and, where it is time, moves ranks: what leaves loses its column of B and its moments.

        Args:
            step: optimizer steps done, this one included.
            total_steps: of the whole job; after `freeze_after` of them ranks stay. None: they never settle.
            state_of: AdamW's moments of a tensor, written in place.
        """
        for name, value_R in found.items():
            self.importance[name] = SMOOTHING * self.importance[name] + (1 - SMOOTHING) * value_R
        frozen = total_steps is not None and step > self._settings.freeze_after * total_steps
        if frozen or step % self._settings.interval_steps:
            return
        active = [self._active(part).tolist() for part in self._parts.values()]
        chosen = choose([self.importance[name].tolist() for name in self._parts], active, self._budget)
        for part, mask in zip(self._parts.values(), chosen, strict=True):
            mask_R = torch.tensor(mask, device=part.a_RI.device)
            gone_R = self._active(part) & ~mask_R
            part.active_R = mask_R
            with torch.no_grad():
                part.b_OR[:, gone_R] = 0
                for moment in ("exp_avg", "exp_avg_sq"):
                    if moment in state_of(part.b_OR):
                        state_of(part.b_OR)[moment][:, gone_R] = 0
                        state_of(part.a_RI)[moment][gone_R] = 0

    def _active(self, part: Factors) -> Tensor:
        assert part.active_R is not None
        return part.active_R

    def _idle(self, part: Factors) -> Tensor:
        return ~self._active(part)

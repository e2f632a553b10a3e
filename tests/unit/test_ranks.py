"""A rank budget: what is chosen, what counts as important, and that reallocation is what it says."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from core.contracts import LoraSettings, RankBudget
from engine.lora import Adapter, new_adapter
from engine.ranks import SMOOTHING, RankAllocator, budget_of, choose, first_choice

LAYERS = {f"layers.{layer}.mlp.{kind}": (6, 5) for layer in range(2) for kind in ("up_proj", "down_proj")}


def make(mean_rank: float, *, rank: int = 3, interval: int = 2) -> tuple[Adapter, RankAllocator]:
    settings = LoraSettings(rank=rank, alpha=rank, rank_budget=RankBudget(mean_rank=mean_rank, interval_steps=interval, freeze_after=0.5))
    adapter = new_adapter(settings, LAYERS, seed=0, device=torch.device("cpu"))
    return adapter, RankAllocator(adapter)


def masks(adapter: Adapter) -> dict[str, list[bool]]:
    return {name: part.active_R.tolist() for name, (part,) in sorted(adapter.factors.items()) if part.active_R is not None}


def measure(
    adapter: Adapter, ranks: RankAllocator, gradients: dict[str, list[float]], *, learning_rate: float = 0.1
) -> dict[str, torch.Tensor]:
    """With gradients of B that are one value a component, zero where none is given, at a learning rate of 0.1."""
    for name, (part,) in adapter.factors.items():
        part.a_RI.grad, part.b_OR.grad = torch.ones_like(part.a_RI), torch.zeros_like(part.b_OR)
        part.b_OR.grad += torch.tensor(gradients.get(name, [0.0] * 3))
    return ranks.measure(0.1)


@given(st.lists(st.integers(1, 6), min_size=1, max_size=12), st.integers(1, 40))
def test_the_first_choice_is_even(ranks: list[int], budget: int) -> None:
    counts = [sum(mask) for mask in first_choice(ranks, budget)]
    assert sum(counts) == min(budget, sum(ranks))
    for count, rank in zip(counts, ranks, strict=True):
        assert count >= min(rank, max(counts) - 1)


@given(st.lists(st.lists(st.floats(0, 10), min_size=2, max_size=4), min_size=1, max_size=6), st.integers(1, 12))
def test_the_most_important_are_chosen(importance: list[list[float]], budget: int) -> None:
    active = [[False] * len(values) for values in importance]
    chosen = choose(importance, active, budget)
    taken = [value for values, mask in zip(importance, chosen, strict=True) for value, on in zip(values, mask, strict=True) if on]
    left = [value for values, mask in zip(importance, chosen, strict=True) for value, on in zip(values, mask, strict=True) if not on]
    assert len(taken) == min(budget, len(taken) + len(left))
    assert not left or max(left) <= min(taken)


def test_equals_stay_where_they_are() -> None:
    assert choose([[0.0, 0.0], [0.0, 0.0]], [[False, True], [False, True]], 2) == [[False, True], [False, True]]


def test_budgets() -> None:
    assert budget_of(LoraSettings(rank=8, rank_budget=RankBudget(mean_rank=2.5)), 210) == 525
    assert budget_of(LoraSettings(rank=8, rank_budget=RankBudget(mean_rank=0.01)), 4) == 1


def test_importance_is_what_removal_and_one_step_would_change() -> None:
    """Sum over outputs of (|B| + lr) |grad|, against the formula; gradients of idle components are hidden afterwards."""
    adapter, ranks = make(2)
    (part,) = adapter.factors["layers.0.mlp.up_proj"]
    with torch.no_grad():
        part.b_OR[:, 0] = 2
    found = measure(adapter, ranks, {"layers.0.mlp.up_proj": [3.0, -1.0, 4.0]})["layers.0.mlp.up_proj"]
    assert found.tolist() == pytest.approx([5 * 2.1 * 3, 5 * 0.1 * 1, 5 * 0.1 * 4])
    assert part.b_OR.grad is not None
    assert part.b_OR.grad[0].tolist() == [3.0, -1.0, 0.0]
    assert part.a_RI.grad is not None
    assert part.a_RI.grad.sum(1).tolist() == [6.0, 6.0, 0.0]


def test_ranks_move_on_time_to_where_gradients_are_and_settle() -> None:
    adapter, ranks = make(1)
    names = sorted(adapter.factors)
    assert [sum(mask) for mask in masks(adapter).values()] == [1, 1, 1, 1]
    states: dict[int, dict[str, torch.Tensor]] = {}
    for (part,) in adapter.factors.values():
        with torch.no_grad():
            part.b_OR[:, 0] = 0.01
        for tensor in (part.a_RI, part.b_OR):
            states[id(tensor)] = {"exp_avg": torch.ones_like(tensor), "exp_avg_sq": torch.ones_like(tensor)}

    def step(number: int, gradients: dict[str, list[float]], total_steps: int | None = None) -> dict[str, list[bool]]:
        found = measure(adapter, ranks, gradients)
        ranks.advance(found, step=number, total_steps=total_steps, state_of=lambda tensor: states[id(tensor)])
        return masks(adapter)

    begun = masks(adapter)
    assert step(1, {names[0]: [1.0, 1.0, 1.0], names[1]: [1.0, 0.0, 0.0]}) == begun
    assert ranks.importance[names[0]][1] == pytest.approx((1 - SMOOTHING) * 5 * 0.1)
    moved = step(2, {names[0]: [1.0, 1.0, 1.0], names[1]: [1.0, 0.0, 0.0]})
    assert [sum(moved[name]) for name in names] == [3, 1, 0, 0]
    for name in names[2:]:
        (part,) = adapter.factors[name]
        assert not part.b_OR.any()
        assert not states[id(part.b_OR)]["exp_avg"][:, 0].any()
        assert not states[id(part.a_RI)]["exp_avg_sq"][0].any()
        assert bool(states[id(part.a_RI)]["exp_avg_sq"][1].all())
    # What left can come back.
    for number in range(3, 9):
        back = step(number, {names[3]: [9.0, 0.0, 0.0]})
    assert back[names[3]] == [True, False, False]
    # Half of 20 steps are over: ranks stay.
    for number in range(11, 17):
        assert step(number, {names[2]: [99.0, 99.0, 99.0]}, total_steps=20) == back
    assert step(18, {}, total_steps=40) != back

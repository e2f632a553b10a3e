"""Every algorithm's loss and gradient, at its defaults, against its paper's formula in float64 over a small softmax table.

The table is a policy over sequences: row c is the distribution of the token that follows token c. Old, reference and rollout engine are
tables of their own.
1. Loss and gradient, off policy (some tokens or completions clipped, some not) and on policy.
2. Completions that are masked change nothing but leave: the loss is that of the others (trl#6369); all masked is 0 (trl#6439).
   So it is with single tokens.
3. Nothing depends on how the completions are cut into parts (trl#6024, ms-swift#10117), metrics included.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.losses import LossInputs, packed_loss
from tests.golden.cases import ALGORITHMS, Algorithm
from tests.golden.formulas import Group

V = 6
LENGTHS = ((3, 1, 7, 4), (2, 5, 5, 11))
PAIRS = ((3, 4), (7, 1), (2, 2))
OFF_POLICY = [name for name, algorithm in ALGORITHMS.items() if not algorithm.on_policy]


def table(seed: int, spread: float = 1.0) -> Tensor:
    return spread * torch.randn(V, V, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def sequences(lengths: tuple[tuple[int, ...], ...]) -> list[list[list[int]]]:
    """Per group, per completion: its tokens, the first one being what is conditioned on."""
    rng = np.random.default_rng(3)
    return [[rng.integers(0, V, length + 1).tolist() for length in group] for group in lengths]


def logprobs_of(logits: Tensor, tokens: list[int]) -> Tensor:
    return torch.log_softmax(logits, -1)[tokens[:-1], tokens[1:]]


class Case:
    """An algorithm's batch over tables: the formula's groups and the engine's packed inputs of the same numbers."""

    def __init__(self, algorithm: Algorithm, *, on_policy: bool) -> None:
        self.algorithm = algorithm
        self.logits = table(0).requires_grad_()
        lengths = PAIRS if algorithm.name == "dpo" else LENGTHS
        old, ref = (self.logits.detach() if on_policy else self.logits.detach() + table(1, 0.8)), table(2)
        self.groups = [
            Group(
                *[[logprobs_of(logits, tokens) for tokens in group] for logits in (self.logits, old, ref)],
                rewards=np.random.default_rng(i).random(len(group)).tolist(),
            )
            for i, group in enumerate(sequences(lengths))
        ]
        self.lengths = [length for group in lengths for length in group]
        self.settings = algorithm.loss(self.lengths)
        advantages: list[Tensor] = []
        for group in self.groups:
            values = algorithm.advantages(
                group.rewards, [each.detach().numpy() for each in group.old], [each.numpy() for each in group.ref]
            )
            advantages += [torch.full_like(new, float(value)).detach() for new, value in zip(group.new, values, strict=True)]
        weights = [torch.full((length,), algorithm.weight(length), dtype=torch.float64) for length in self.lengths]
        self.completions = [
            LossInputs(new, advantage, weight, (len(new),), old_N=None if on_policy else old, ref_N=ref)
            for new, old, ref, advantage, weight in zip(
                [each for group in self.groups for each in group.new], [each for group in self.groups for each in group.old],
                [each for group in self.groups for each in group.ref], advantages, weights, strict=True,
            )
        ]  # fmt: skip

    def gradient(self, loss: Tensor) -> Tensor:
        (gradient,) = torch.autograd.grad(loss, self.logits, retain_graph=True)
        return gradient


def joined(parts: list[LossInputs]) -> LossInputs:
    """Several completions as one packed part."""

    def cat(name: str) -> Tensor | None:
        found = [getattr(part, name) for part in parts]
        return None if found[0] is None else torch.cat(found)

    new, advantages, weights = cat("logprobs_N"), cat("advantages_N"), cat("weights_N")
    assert new is not None
    assert advantages is not None
    assert weights is not None
    lengths = tuple(length for part in parts for length in part.lengths)
    return LossInputs(
        new, advantages, weights, lengths, cat("old_N"), cat("ref_N"), sampler_N=cat("sampler_N"), entropies_N=cat("entropies_N")
    )


@pytest.mark.parametrize(("name", "on_policy"), [(name, True) for name in ALGORITHMS] + [(name, False) for name in OFF_POLICY])
def test_loss_and_gradient_equal_the_paper(name: str, on_policy: bool) -> None:
    algorithm = ALGORITHMS[name]
    case = Case(algorithm, on_policy=on_policy)
    loss, metrics = packed_loss(joined(case.completions), case.settings)
    expected = algorithm.formula(case.groups)
    scale = float(case.gradient(expected).abs().max())
    assert scale > 1e-3
    # 1e-6 and no less: advantages travel in float32.
    assert float((case.gradient(loss) - case.gradient(expected)).abs().max()) < 1e-6 * max(1.0, scale)
    if not algorithm.value_differs:
        assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-6, abs=1e-6)
    if "ratio" in metrics:
        assert (metrics["ratio"] == 1.0) == on_policy
        if name != "cispo":
            assert (0 < metrics["clip_fraction"] < 1) == (not on_policy)


# dpo's weights are factors within a pair: a pair is left out by leaving out its group.
@pytest.mark.parametrize("name", [name for name in ALGORITHMS if name != "dpo"])
def test_masked_completions_leave_numerator_and_denominator(name: str) -> None:
    algorithm = ALGORITHMS[name]
    case = Case(algorithm, on_policy=algorithm.on_policy)
    masked = {1, 6}
    kept = [part for i, part in enumerate(case.completions) if i not in masked]
    settings = algorithm.loss([length for part in kept for length in part.lengths])
    with_masked = [
        replace(part, weights_N=torch.zeros_like(part.weights_N)) if i in masked else part for i, part in enumerate(case.completions)
    ]
    loss, _ = packed_loss(joined(with_masked), settings)
    expected, _ = packed_loss(joined(kept), settings)
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), abs=1e-12)
    assert float((case.gradient(loss) - case.gradient(expected)).abs().max()) < 1e-12
    nothing, metrics = packed_loss(
        joined([replace(part, weights_N=torch.zeros_like(part.weights_N)) for part in case.completions]), settings
    )
    assert float(nothing.detach()) == 0
    assert float(case.gradient(nothing).abs().max()) == 0
    assert np.isfinite(list(metrics.values())).all()


@pytest.mark.parametrize("name", ALGORITHMS)
def test_masked_tokens_count_nowhere(name: str) -> None:
    """As rejected tokens are: the loss is that of completions without them, ratios and means of completions included."""
    algorithm = ALGORITHMS[name]
    case = Case(algorithm, on_policy=algorithm.on_policy)
    masked, without = [], []
    for part in case.completions:
        kept = torch.arange(part.lengths[0]) % 3 != 1
        masked.append(replace(part, weights_N=part.weights_N * kept))
        old = None if part.old_N is None else part.old_N[kept]
        assert part.ref_N is not None
        without.append(
            LossInputs(part.logprobs_N[kept], part.advantages_N[kept], part.weights_N[kept], (int(kept.sum()),), old, part.ref_N[kept])
        )
    loss, _ = packed_loss(joined(masked), case.settings)
    expected, _ = packed_loss(joined(without), case.settings)
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), abs=1e-12)
    assert float((case.gradient(loss) - case.gradient(expected)).abs().max()) < 1e-12


@pytest.mark.parametrize("cut", [1, 2, 3])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_parts_add_up(name: str, cut: int) -> None:
    algorithm = ALGORITHMS[name]
    case = Case(algorithm, on_policy=algorithm.on_policy)
    if name == "dpo":
        cut *= 2
    whole, whole_metrics = packed_loss(joined(case.completions), case.settings)
    parts = [joined(case.completions[i : i + cut]) for i in range(0, len(case.completions), cut)]
    results = [packed_loss(part, case.settings) for part in parts]
    total = torch.stack([loss for loss, _ in results]).sum()
    assert float(total.detach()) == pytest.approx(float(whole.detach()), abs=1e-12)
    assert float((case.gradient(total) - case.gradient(whole)).abs().max()) < 1e-12
    tokens = [part.logprobs_N.numel() for part in parts]
    for metric, expected in whole_metrics.items():
        mean = sum(metrics[metric] * count for (_, metrics), count in zip(results, tokens, strict=True)) / sum(tokens)
        assert mean == pytest.approx(expected, abs=1e-12), metric

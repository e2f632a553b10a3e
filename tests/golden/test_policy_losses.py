"""packed_loss against its formulas in float64.

1. The KL term's gradient is that of the exact KL(policy || reference), enumerated over a small vocabulary, on and off policy
   (OpenRLHF#1309, trl#3025).
2. Clipping is asymmetric and cuts the gradient on the side that the advantage's sign says.
3. Nothing to train on gives 0, not NaN (trl#6439).
"""

import pytest
import torch

from engine.losses import LossInputs, packed_loss
from engine.types import LossSettings

V = 7


def policy(seed: int) -> torch.Tensor:
    return torch.randn(V, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("off_policy", [False, True])
def test_kl_gradient_is_exact(off_policy: bool) -> None:
    logits, ref = policy(0).requires_grad_(), torch.log_softmax(policy(1), -1)
    logprobs = torch.log_softmax(logits, -1)
    (exact,) = torch.autograd.grad((logprobs.exp() * (logprobs - ref)).sum(), logits, retain_graph=True)
    # Every token once, weighed by how often the sampling policy draws it: the sum is the expectation.
    old = torch.log_softmax(policy(2), -1) if off_policy else logprobs.detach()
    inputs = LossInputs(logprobs, torch.zeros_like(old), old.exp(), (V,), old_N=old if off_policy else None, ref_N=ref)
    loss, _ = packed_loss(inputs, LossSettings(clip_low=0.2, clip_high=0.2, beta=1.0, denominator=1.0, temperature=1.0))
    (got,) = torch.autograd.grad(loss, logits, retain_graph=True)
    assert torch.allclose(got, exact, atol=1e-12)
    assert float(loss.detach()) == pytest.approx(float((logprobs.exp() * (logprobs - ref)).sum().detach()), abs=1e-12)
    gap = ref - logprobs
    (biased,) = torch.autograd.grad((old.exp() * (gap.exp() - gap - 1)).sum(), logits)
    assert float((biased - exact).norm() / exact.norm()) > 0.1


def test_clip_cuts_the_right_side() -> None:
    ratio = torch.tensor([0.5, 0.5, 1.0, 1.25, 1.5, 1.5], dtype=torch.float64)
    advantages = torch.tensor([1.0, -1.0, 1.0, 1.0, 1.0, -1.0], dtype=torch.float64)
    logprobs = ratio.log().requires_grad_()
    zeros, ones = torch.zeros(6, dtype=torch.float64), torch.ones(6, dtype=torch.float64)
    settings = LossSettings(clip_low=0.2, clip_high=0.28, beta=0, denominator=6, temperature=1.0)
    loss, metrics = packed_loss(LossInputs(logprobs, advantages, ones, (2, 4), old_N=zeros), settings)
    loss.backward()
    assert float(loss.detach()) == pytest.approx((-0.5 + 0.8 - 1.0 - 1.25 - 1.28 + 1.5) / 6, abs=1e-12)
    expected = torch.tensor([-0.5, 0, -1.0, -1.25, 0, 1.5], dtype=torch.float64) / 6
    assert logprobs.grad is not None
    assert torch.allclose(logprobs.grad, expected, atol=1e-12)
    assert metrics["clip_fraction"] == pytest.approx(2 / 6)


def test_nothing_to_train_on_is_zero() -> None:
    empty = torch.zeros(0, requires_grad=True)
    settings = LossSettings(clip_low=0.2, clip_high=0.2, beta=0.1, denominator=1, temperature=1.0)
    loss, metrics = packed_loss(LossInputs(empty, empty.detach(), empty.detach(), (), ref_N=empty.detach()), settings)
    loss.backward()
    assert float(loss) == 0
    assert set(metrics.values()) == {0.0}


@pytest.mark.parametrize(("beta", "denominator", "weights"), [(0.1, 1.0, 3), (0.0, 0.0, 3), (0.0, 1.0, 2)])
def test_misuse_is_refused(beta: float, denominator: float, weights: int) -> None:
    with pytest.raises(ValueError, match=r"beta|denominator|shape"):
        packed_loss(
            LossInputs(torch.zeros(3), torch.zeros(3), torch.ones(weights), (3,)),
            LossSettings(clip_low=0.2, clip_high=0.2, beta=beta, denominator=denominator, temperature=1.0),
        )

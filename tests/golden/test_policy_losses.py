"""What single terms of a loss do, in float64: KL, clips, importance weights, entropy bonus, FlowRL's estimate of log Z.

1. The KL term's gradient is that of the exact KL(policy || reference), enumerated over a small vocabulary, on and off policy, for every
   kind that has one; so is the KL's in the reward (OpenRLHF#1309, trl#3025).
2. Clipping is asymmetric and cuts the gradient on the side that the advantage's sign says, per token or per completion; CISPO cuts none.
3. Truncated importance sampling weighs the policy term by min(cap, trainer / sampler), without a gradient, and nothing else.
4. The entropy bonus's gradient is the entropy's, by finite differences.
5. FlowRL's gradient is unbiased: enumerated over groups of two, it is twice that of KL(policy || target) per token.
6. DPO's and SFT's metrics. Nothing to train on gives 0, not NaN (trl#6439); missing inputs are told.
"""

import itertools
from collections.abc import Mapping

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.advantages import flow_offsets, leave_one_out, rewards_less_kl
from engine.losses import LossInputs, packed_loss
from engine.types import LossKind, LossSettings

V = 5
KL_KINDS: tuple[LossKind, ...] = ("clip", "sequence_clip", "cispo")
SAMPLED: tuple[LossKind, ...] = (*KL_KINDS, "flow")


def settings(
    kind: LossKind = "clip", *, beta: float = 0.0, denominator: float = 1.0, bonus: float = 0.0, cap: float | None = None
) -> LossSettings:
    return LossSettings(0.2, 0.28, beta, denominator, temperature=1.0, kind=kind, entropy_bonus=bonus, importance_cap=cap)


def policy(seed: int) -> Tensor:
    return torch.randn(V, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def values(*numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


@pytest.mark.parametrize("kind", KL_KINDS)
@pytest.mark.parametrize("off_policy", [False, True])
def test_kl_gradient_is_exact(kind: LossKind, off_policy: bool) -> None:
    logits, ref = policy(0).requires_grad_(), torch.log_softmax(policy(1), -1)
    logprobs = torch.log_softmax(logits, -1)
    exact = (logprobs.exp() * (logprobs - ref)).sum()
    (expected,) = torch.autograd.grad(exact, logits, retain_graph=True)
    # Every token once, weighed by how often the sampling policy draws it: the sum is the expectation.
    old = torch.log_softmax(policy(2), -1) if off_policy else logprobs.detach()
    inputs = LossInputs(logprobs, torch.zeros_like(old), old.exp(), (V,), old_N=old if off_policy else None, ref_N=ref)
    loss, _ = packed_loss(inputs, settings(kind, beta=1.0))
    (got,) = torch.autograd.grad(loss, logits, retain_graph=True)
    assert torch.allclose(got, expected, atol=1e-12)
    assert float(loss.detach()) == pytest.approx(float(exact.detach()), abs=1e-12)
    gap = ref - logprobs
    (biased,) = torch.autograd.grad((old.exp() * (gap.exp() - gap - 1)).sum(), logits)
    assert float((biased - expected).norm() / expected.norm()) > 0.1


def pairs_loss(logits: Tensor, kind: LossKind, advantages: Mapping[tuple[int, int], NDArray[np.float32]]) -> Tensor:
    """Expectation of the loss over groups of two one-token completions, each drawn from the policy."""
    logprobs = torch.log_softmax(logits, -1)
    total = torch.zeros((), dtype=torch.float64)
    for pair in itertools.product(range(V), range(V)):
        chance = float(logprobs.detach()[list(pair)].sum().exp())
        inputs = LossInputs(logprobs[list(pair)], torch.from_numpy(advantages[pair]).double(), torch.ones(2, dtype=torch.float64), (1, 1))
        total = total + chance * packed_loss(inputs, settings(kind, denominator=2))[0]
    return total


def test_kl_in_the_reward_has_the_exact_gradient() -> None:
    """With a leave-one-out baseline (RLOO), over all groups of two: the gradient of -(E r - beta KL(policy || reference))."""
    logits, ref, rewards, beta = policy(0).requires_grad_(), torch.log_softmax(policy(1), -1), policy(2), 0.3
    logprobs = torch.log_softmax(logits, -1)
    (expected,) = torch.autograd.grad(-(logprobs.exp() * (rewards - beta * (logprobs - ref))).sum(), logits, retain_graph=True)
    advantages = {
        pair: leave_one_out(
            rewards_less_kl(
                rewards[list(pair)].tolist(),
                [logprobs.detach().numpy()[[i]] for i in pair],
                [ref.numpy()[[i]] for i in pair],
                beta=beta,
            )
        )
        for pair in itertools.product(range(V), range(V))
    }
    (got,) = torch.autograd.grad(pairs_loss(logits, "clip", advantages), logits)
    assert torch.allclose(got, expected, atol=1e-6)


def test_flow_gradient_is_unbiased() -> None:
    """Equal rewards: the target is the reference. A group's own mean as log Z would give half of it."""
    logits, ref = policy(0).requires_grad_(), torch.log_softmax(policy(1), -1)
    logprobs = torch.log_softmax(logits, -1)
    (expected,) = torch.autograd.grad(2 * (logprobs.exp() * (logprobs - ref)).sum(), logits, retain_graph=True)
    offsets = {
        pair: flow_offsets([1.0, 1.0], [logprobs.detach().numpy()[[i]] for i in pair], [ref.numpy()[[i]] for i in pair], reward_scale=15)
        for pair in itertools.product(range(V), range(V))
    }
    (got,) = torch.autograd.grad(pairs_loss(logits, "flow", offsets), logits)
    assert torch.allclose(got, expected, atol=1e-6)


def test_clip_cuts_the_right_side() -> None:
    ratio, advantages = values(0.5, 0.5, 1.0, 1.25, 1.5, 1.5), values(1, -1, 1, 1, 1, -1)
    logprobs = ratio.log().requires_grad_()
    ones = torch.ones_like(ratio)
    loss, metrics = packed_loss(LossInputs(logprobs, advantages, ones, (2, 4), old_N=torch.zeros_like(ratio)), settings(denominator=6))
    (got,) = torch.autograd.grad(loss, logprobs)
    assert float(loss.detach()) == pytest.approx((-0.5 + 0.8 - 1.0 - 1.25 - 1.28 + 1.5) / 6, abs=1e-12)
    assert torch.allclose(got, values(-0.5, 0, -1.0, -1.25, 0, 1.5) / 6, atol=1e-12)
    assert metrics["clip_fraction"] == pytest.approx(2 / 6)


def test_gspo_clips_completions_and_shares_the_gradient() -> None:
    """Ratios of 2 and 1/2 make a completion's 1: no token is cut, and each moves the completion by 1 / length."""
    ratio = values(2, 0.5, 4, 1, 1, 0.25)
    logprobs = ratio.log().requires_grad_()
    advantages, weights = values(1, 1, 1, 1, -1, -1), torch.full((6,), 0.5, dtype=torch.float64)
    inputs = LossInputs(logprobs, advantages, weights, (2, 2, 2), old_N=torch.zeros_like(ratio))
    loss, metrics = packed_loss(inputs, settings("sequence_clip"))
    (got,) = torch.autograd.grad(loss, logprobs)
    assert float(loss.detach()) == pytest.approx(-1.0 - 1.28 + 0.8, abs=1e-12)
    assert torch.allclose(got, values(-0.5, -0.5, 0, 0, 0, 0), atol=1e-12)
    assert metrics == pytest.approx({"ratio": (1 + 2 + 0.5) / 3, "clip_fraction": 2 / 3, "kl": 0})


def test_cispo_cuts_no_gradient() -> None:
    ratio, advantages = values(0.5, 0.5, 1.1, 1.5), values(1, -1, 1, 1)
    logprobs = ratio.log().requires_grad_()
    inputs = LossInputs(logprobs, advantages, torch.ones(4, dtype=torch.float64), (4,), old_N=torch.zeros_like(ratio))
    loss, metrics = packed_loss(inputs, settings("cispo"))
    (got,) = torch.autograd.grad(loss, logprobs)
    assert torch.allclose(got, -values(0.8, 0.8, 1.1, 1.28) * advantages, atol=1e-12)
    assert metrics["clip_fraction"] == 3 / 4


@pytest.mark.parametrize("off_policy", [False, True])
@pytest.mark.parametrize("kind", SAMPLED)
def test_importance_weighs_the_policy_term_only(kind: LossKind, off_policy: bool) -> None:
    """Against the same loss with the weight put on the policy term by hand."""
    generator = torch.Generator().manual_seed(0)
    lengths, cap = (3, 1, 4), 1.2
    new, noise, sampled = (torch.randn(8, generator=generator, dtype=torch.float64) for _ in range(3))
    new = new.requires_grad_()
    old = (new.detach() + 0.3 * noise) if off_policy else None
    sampler = (new.detach() if old is None else old) - 0.5 * sampled
    advantages = torch.repeat_interleave(values(1, -0.5, 2), torch.tensor(lengths))
    weights = torch.rand(8, generator=generator, dtype=torch.float64)
    ref = None if kind == "flow" else new.detach() + 0.1
    beta = 0.0 if kind == "flow" else 0.2

    log_importance = (new.detach() if old is None else old) - sampler
    parts = log_importance.split(lengths)
    by_token = torch.cat([part.exp().clamp(max=cap) for part in parts])
    by_completion = torch.cat([part.mean().exp().clamp(max=cap).expand_as(part) for part in parts])
    importance = by_token if kind in ("clip", "cispo") else by_completion
    assert 0 < int((importance == cap).sum()) < 8

    inputs = LossInputs(new, advantages, weights, lengths, old, ref, sampler_N=sampler)
    loss, metrics = packed_loss(inputs, settings(kind, beta=beta, cap=cap))
    weighed, _ = packed_loss(LossInputs(new, advantages, weights * importance, lengths, old), settings(kind))
    kl_inputs = LossInputs(new, torch.zeros_like(advantages), weights, lengths, old, ref)
    expected = weighed if kind == "flow" else weighed + packed_loss(kl_inputs, settings(kind, beta=beta))[0]
    got_gradient, gradient = (torch.autograd.grad(each, new, retain_graph=True)[0] for each in (loss, expected))
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), abs=1e-12)
    assert torch.allclose(got_gradient, gradient, atol=1e-12)
    assert metrics["tis_weight"] == pytest.approx(float(importance.mean()), abs=1e-12)


@pytest.mark.parametrize("kind", [*SAMPLED, "sft"])
def test_entropy_bonus_has_the_entropys_gradient(kind: LossKind) -> None:
    """The loss less the loss without a bonus, by finite differences of weight * entropy over a softmax table."""
    logits = torch.stack([policy(seed) for seed in range(3)])
    weights, bonus, h = values(1, 0.25, 0), 0.7, 1e-5

    def rows(table: Tensor) -> tuple[Tensor, Tensor]:
        logprobs = torch.log_softmax(table, -1)
        return logprobs[:, 1], -(logprobs.exp() * logprobs).sum(1)

    moving = logits.clone().requires_grad_()
    logprobs, entropies = rows(moving)
    inputs = LossInputs(logprobs, torch.ones(3, dtype=torch.float64), weights, (2, 1), entropies_N=entropies)
    with_bonus, metrics = packed_loss(inputs, settings(kind, denominator=4, bonus=bonus))
    without, _ = packed_loss(inputs, settings(kind, denominator=4))
    (got,) = torch.autograd.grad(with_bonus - without, moving)
    expected = torch.zeros_like(logits)
    for place in itertools.product(range(3), range(V)):
        nudge = torch.zeros_like(logits)
        nudge[place] = h
        rise = (rows(logits + nudge)[1] - rows(logits - nudge)[1]) * weights
        expected[place] = -bonus * rise.sum() / (2 * h) / 4
    assert torch.allclose(got, expected, atol=1e-9)
    assert metrics["entropy"] == pytest.approx(float(entropies.detach().mean()))


def test_metrics_of_pairs_and_answers() -> None:
    """A pair counts by its tokens, as every metric does, so that micro-batches may be averaged by tokens."""
    new, ref = values(1, 1, 3, 0, 0, 0), torch.zeros(6, dtype=torch.float64)
    inputs = LossInputs(new - 5, torch.zeros_like(ref), torch.ones_like(ref), (1, 1, 1, 3), ref_N=ref - 5)
    _, metrics = packed_loss(inputs, settings("dpo", beta=0.5))
    assert metrics == pytest.approx({"margin": 0.5 * (0 * 2 + 3 * 4) / 6, "accuracy": 4 / 6})
    _, metrics = packed_loss(inputs, settings("sft"))
    assert metrics == pytest.approx({"nll": 5 - 5 / 6})


@pytest.mark.parametrize("kind", [*SAMPLED, "sft", "dpo"])
def test_nothing_to_train_on_is_zero(kind: LossKind) -> None:
    empty = torch.zeros(0, requires_grad=True)
    none = empty.detach()
    beta = 0.1 if kind in (*KL_KINDS, "dpo") else 0.0
    loss, metrics = packed_loss(LossInputs(empty, none, none, (), ref_N=none), settings(kind, beta=beta))
    loss.backward()
    assert float(loss.detach()) == 0
    assert set(metrics.values()) == {0.0}


@pytest.mark.parametrize(
    ("loss", "lengths", "reason"),
    [
        (settings(beta=0.1), (3, 1), "ref_N"),
        (settings(denominator=0), (3, 1), "denominator"),
        (settings(), (3, 2), "lengths"),
        (settings(cap=2.0), (3, 1), "sampler_N"),
        (settings("sequence_clip", cap=2.0), (3, 1), "sampler_N"),
        (settings("flow", cap=2.0), (3, 1), "sampler_N"),
        (settings(bonus=0.1), (3, 1), "entropies_N"),
        (settings("dpo"), (3, 1), "ref_N"),
    ],
)
def test_missing_inputs_are_told(loss: LossSettings, lengths: tuple[int, ...], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        packed_loss(LossInputs(torch.zeros(4), torch.zeros(4), torch.ones(4), lengths), loss)


def test_shapes_and_pairs_are_checked() -> None:
    with pytest.raises(ValueError, match="one shape"):
        LossInputs(torch.zeros(4), torch.zeros(4), torch.ones(3), (4,))
    with pytest.raises(ValueError, match="pairs"):
        packed_loss(LossInputs(torch.zeros(4), torch.zeros(4), torch.ones(4), (4,), ref_N=torch.zeros(4)), settings("dpo", beta=0.1))

"""token_logprobs against log_softmax in float64.

1. Logprobs, entropies and the gradients of both, whatever the chunk, at temperature 1 and below.
2. The entropy's gradient against finite differences of its definition.
3. Without a wish for it, an entropy carries no gradient and nothing more is kept for the backward.
4. A bf16 base gets float32 logits.
"""

import pytest
import torch

from engine.logprobs import token_logprobs


def relative(got: torch.Tensor | None, expected: torch.Tensor | None) -> float:
    assert got is not None
    assert expected is not None
    return float((got.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize("chunk_bytes", [1, 4 * 50 * 7, 1 << 20])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("entropy", ["none", "value", "gradient"])
def test_chunked_logprobs_equal_log_softmax(chunk_bytes: int, temperature: float, entropy: str) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(23, 16, generator=generator, requires_grad=True)
    head, targets = torch.randn(50, 16, generator=generator), torch.randint(0, 50, (23,), generator=generator)
    scale, entropy_scale = torch.randn(23, generator=generator), torch.randn(23, generator=generator)
    logprobs, entropies = token_logprobs(
        hidden, head, targets, temperature=temperature, entropy=entropy != "none", entropy_gradient=entropy == "gradient",
        chunk_bytes=chunk_bytes,
    )  # fmt: skip
    wide = hidden.detach().double().requires_grad_()
    full = torch.log_softmax(wide @ head.double().t() / temperature, -1)
    expected, expected_entropies = full.gather(1, targets[:, None])[:, 0], -(full.exp() * full).sum(1)
    total, expected_total = (logprobs * scale).sum(), (expected * scale.double()).sum()
    if entropy == "gradient":
        total = total + (entropies * entropy_scale).sum()
        expected_total = expected_total + (expected_entropies * entropy_scale.double()).sum()
    total.backward()
    expected_total.backward()
    assert torch.allclose(logprobs.double(), expected, atol=1e-5)
    assert torch.allclose(entropies.double(), expected_entropies * (entropy != "none"), atol=1e-5)
    assert relative(hidden.grad, wide.grad) < 1e-6


def test_entropy_gradient_equals_finite_differences() -> None:
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(5, 8, generator=generator, requires_grad=True)
    head, targets = torch.randn(30, 8, generator=generator), torch.randint(0, 30, (5,), generator=generator)
    _, entropies = token_logprobs(hidden, head, targets, temperature=0.8, entropy=True, entropy_gradient=True)
    entropies.sum().backward()

    def entropy_of(values: torch.Tensor) -> float:
        probabilities = torch.softmax(values @ head.double().t() / 0.8, -1)
        return float(-(probabilities * probabilities.log()).sum())

    start, differences, h = hidden.detach().double(), torch.zeros(5, 8, dtype=torch.float64), 1e-5
    for row in range(5):
        for column in range(8):
            nudge = torch.zeros_like(start)
            nudge[row, column] = h
            differences[row, column] = (entropy_of(start + nudge) - entropy_of(start - nudge)) / (2 * h)
    assert relative(hidden.grad, differences) < 1e-5


def test_an_entropy_without_a_gradient_costs_nothing_in_the_backward() -> None:
    generator = torch.Generator().manual_seed(2)
    hidden = torch.randn(6, 8, generator=generator, requires_grad=True)
    head, targets = torch.randn(20, 8, generator=generator), torch.randint(0, 20, (6,), generator=generator)
    kept: list[int] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        _, entropies = token_logprobs(hidden, head, targets, temperature=1.0, entropy=True)
    assert not entropies.requires_grad
    assert kept == [6 * 8]
    with pytest.raises(ValueError, match="entropy"):
        token_logprobs(hidden, head, targets, temperature=1.0, entropy_gradient=True)


@pytest.mark.parametrize("entropy", [False, True])
def test_bf16_base_gets_float32_logits(entropy: bool) -> None:
    """A bf16 matmul would round logits to 8 bits (trl#4159's kind: two sides that differ by numerics alone)."""
    generator = torch.Generator().manual_seed(0)
    hidden = (4 * torch.randn(9, 64, generator=generator)).bfloat16().requires_grad_()
    head, targets = torch.randn(20000, 64, generator=generator).bfloat16(), torch.randint(0, 20000, (9,), generator=generator)
    logprobs, entropies = token_logprobs(hidden, head, targets, temperature=1.0, entropy=entropy, entropy_gradient=entropy)
    (logprobs.sum() + entropies.sum()).backward()
    wide = hidden.detach().double().requires_grad_()
    full = torch.log_softmax(wide @ head.double().t(), -1)
    expected = full.gather(1, targets[:, None])[:, 0]
    (expected.sum() - entropy * (full.exp() * full).sum()).backward()
    assert logprobs.dtype == torch.float32
    assert torch.allclose(logprobs.double(), expected, atol=1e-4)
    assert relative(hidden.grad, wide.grad) < 0.01

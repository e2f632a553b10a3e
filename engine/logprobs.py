"""Per-token logprobs out of hidden states without ever holding a [tokens x vocabulary] tensor whole.

Dimensions: M tokens, H hidden, V vocabulary, C rows of one chunk.
"""

from typing import Any

import torch
from torch import Tensor

# Bytes of one [C, V] float32 buffer: some hundred rows at a vocabulary of 50,000, enough for a matmul at full rate.
CHUNK_BYTES = 64 * 2**20


def token_logprobs(
    hidden_MH: Tensor,
    head_VH: Tensor,
    targets_M: Tensor,
    *,
    temperature: float,
    entropy: bool = False,
    entropy_gradient: bool = False,
    chunk_bytes: int = CHUNK_BYTES,
) -> tuple[Tensor, Tensor]:
    """log softmax(hidden @ head.T / temperature) at the targets, softmax in float32 whatever the base's precision.

    Args:
        hidden_MH: hidden states after the last norm; gradients flow to them.
        head_VH: the language-model head, frozen.
        targets_M: token ids, int64.
        temperature: above 0.
        entropy: whether to compute entropies too.
        entropy_gradient: whether they carry a gradient (for a bonus on them); it costs one more matmul over the vocabulary.
    Returns:
        (logprobs_M, entropies_M), nats, float32; entropies are zero where not asked for.
    Raises:
        ValueError: entropy_gradient without entropy.
    """
    if entropy_gradient and not entropy:
        raise ValueError("entropy_gradient needs entropy")
    options = (temperature, entropy, entropy_gradient, chunk_bytes)
    out: tuple[Tensor, Tensor] = _TokenLogprobs.apply(hidden_MH, head_VH, targets_M, *options)  # pyright: ignore[reportAssignmentType]
    return out


class _TokenLogprobs(torch.autograd.Function):
    """A row's logprob has the gradient (head[target] - softmax @ head) / temperature, times a scalar that the backward brings.

    So the forward keeps that one [M, H] tensor, and the backward needs no logits again: two matmuls over the vocabulary in all.
    An entropy's gradient is -(p * (log p + entropy)) @ head / temperature, with p the softmax: another such tensor, only where wanted.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_MH: Tensor,
        head_VH: Tensor,
        targets_M: Tensor,
        temperature: float,
        entropy: bool,
        entropy_gradient: bool,
        chunk_bytes: int,
    ) -> tuple[Tensor, Tensor]:
        num_tokens, vocab_size = hidden_MH.shape[0], head_VH.shape[0]
        needs_gradient = bool(ctx.needs_input_grad[0])
        logprobs_M = torch.empty(num_tokens, dtype=torch.float32, device=hidden_MH.device)
        entropies_M = torch.zeros_like(logprobs_M)
        slope_MH = torch.empty(hidden_MH.shape, dtype=torch.float32, device=hidden_MH.device) if needs_gradient else None
        entropy_slope_MH = torch.empty_like(slope_MH) if slope_MH is not None and entropy_gradient else None
        num_buffers = 2 if entropy else 1
        rows = min(num_tokens, max(1, chunk_bytes // (4 * vocab_size * num_buffers)))
        buffers = torch.empty(num_buffers, rows, vocab_size, dtype=torch.float32, device=hidden_MH.device)
        for start in range(0, num_tokens, rows or 1):
            chunk = slice(start, min(start + rows, num_tokens))
            logits_CV = buffers[0, : chunk.stop - start]
            exp_CV = buffers[-1, : chunk.stop - start]
            _head_product(hidden_MH[chunk], head_VH, 1 / temperature, logits_CV)
            logits_CV -= logits_CV.amax(dim=1, keepdim=True)
            chosen_C = logits_CV.gather(1, targets_M[chunk, None]).squeeze(1)
            torch.exp(logits_CV, out=exp_CV)
            sum_C = exp_CV.sum(dim=1)
            logprobs_M[chunk] = chosen_C - sum_C.log()
            if entropy:
                mean_logit_C = torch.bmm(exp_CV[:, None, :], logits_CV[:, :, None]).flatten() / sum_C
                entropies_M[chunk] = sum_C.log() - mean_logit_C
            if slope_MH is not None:
                exp_CV /= sum_C[:, None]
                if entropy_slope_MH is not None:
                    # log p + entropy, in place: the logits are not needed again.
                    logits_CV += (entropies_M[chunk] - sum_C.log())[:, None]
                    entropy_slope_MH[chunk] = _softmax_product(logits_CV.mul_(exp_CV), head_VH) / -temperature
                slope_MH[chunk] = (head_VH[targets_M[chunk]].float() - _softmax_product(exp_CV, head_VH)) / temperature
        if entropy_slope_MH is None:
            ctx.mark_non_differentiable(entropies_M)
        ctx.dtype = hidden_MH.dtype
        if slope_MH is not None:
            ctx.save_for_backward(slope_MH, entropy_slope_MH)
        return logprobs_M, entropies_M

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        slope_MH, entropy_slope_MH = ctx.saved_tensors
        grad_MH = slope_MH * grads[0][:, None]
        if entropy_slope_MH is not None:
            grad_MH.addcmul_(entropy_slope_MH, grads[1][:, None])
        return grad_MH.to(ctx.dtype), None, None, None, None, None, None


# A matmul in bf16 rounds its output to 8 bits, 0.06 at a logit of 20; so a bf16 head is widened, by parts that stay small.
_WIDEN_ROWS = 8192


def _head_product(hidden_CH: Tensor, head_VH: Tensor, factor: float, out_CV: Tensor) -> None:
    """out = factor * hidden @ head.T in float32."""
    wide_CH = hidden_CH.float() * factor if factor != 1 else hidden_CH.float()
    if head_VH.dtype == torch.float32:
        torch.mm(wide_CH, head_VH.t(), out=out_CV)
        return
    for start in range(0, head_VH.shape[0], _WIDEN_ROWS):
        part = slice(start, start + _WIDEN_ROWS)
        out_CV[:, part] = wide_CH @ head_VH[part].float().t()


def _softmax_product(softmax_CV: Tensor, head_VH: Tensor) -> Tensor:
    """softmax (or what else weighs tokens) @ head in float32."""
    if head_VH.dtype == torch.float32:
        return softmax_CV @ head_VH
    total_CH = torch.zeros(softmax_CV.shape[0], head_VH.shape[1], dtype=torch.float32, device=head_VH.device)
    for start in range(0, head_VH.shape[0], _WIDEN_ROWS):
        part = slice(start, start + _WIDEN_ROWS)
        total_CH.addmm_(softmax_CV[:, part], head_VH[part].float())
    return total_CH

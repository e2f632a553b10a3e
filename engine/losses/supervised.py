"""Losses on given answers: cross-entropy, and preference pairs.

Dimensions: N completion tokens of one op in a micro-batch, B completions, P pairs.
"""

from torch import Tensor
from torch.nn.functional import logsigmoid

from engine.losses.inputs import LossInputs, Terms
from engine.types import LossSettings


def sft_loss(inputs: LossInputs, settings: LossSettings) -> Terms:
    """Cross-entropy of the answers' tokens: -logprob, weighted. Metric: nll, nats a token."""
    return Terms(-(inputs.logprobs_N * inputs.weights_N).sum(), {"nll": -inputs.logprobs_N.detach().sum()})


def dpo_loss(inputs: LossInputs, settings: LossSettings) -> Terms:
    """-log sigmoid(beta * (log-ratio of the chosen - log-ratio of the rejected)), log-ratios against the reference policy.

    Completions come as chosen, rejected, chosen, ...; the denominator counts pairs. A token's weight is its factor in the log-ratio's
    sum: 1 is the paper's.
    Metrics: margin (beta times the difference, nats) and accuracy (share of pairs with a positive one), each pair by its tokens.

    Source: Rafailov et al. 2023, arXiv:2305.18290, eq. 7.
    """
    if inputs.ref_N is None:
        raise ValueError("dpo needs ref_N")
    if len(inputs.lengths) % 2:
        raise ValueError(f"dpo needs pairs of completions; got {len(inputs.lengths)} completions")
    log_ratio_B = inputs.sums_B((inputs.logprobs_N - inputs.ref_N) * inputs.weights_N)
    margin_P = settings.beta * (log_ratio_B[0::2] - log_ratio_B[1::2])

    def token_sum(values_P: Tensor) -> Tensor:
        return inputs.token_sum(values_P.to(margin_P.dtype).repeat_interleave(2))

    sums = {"margin": token_sum(margin_P.detach()), "accuracy": token_sum(margin_P > 0)}
    return Terms(-logsigmoid(margin_P).sum(), sums)

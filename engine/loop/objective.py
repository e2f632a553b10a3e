"""The second half of a step, up to the loss: rewards become signals, signals become a batch with its denominator.

Dimensions: G completions of one prompt, T tokens of one completion.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from core.contracts import AlgorithmName, AlgorithmSettings, JobSpec
from engine.advantages import flow_offsets, group_advantages, is_dead, leave_one_out, overlong_penalty, rewards_less_kl
from engine.loop.rollout import GradedGroup
from engine.types import FloatArray, LossKind, LossSettings, TrainGroup, Verbs

_KINDS: Mapping[AlgorithmName, LossKind] = {"gspo": "sequence_clip", "cispo": "cispo", "flowrl": "flow", "sft": "sft", "dpo": "dpo"}
Logprobs = Sequence[Sequence[FloatArray]]


@dataclass(frozen=True)
class Batch:
    """What is trained on, and what counts beside it."""

    groups: list[TrainGroup]
    """Groups that teach. Weights are not set yet; `sampler_logprobs` always are."""
    num_dead_completions: int = 0
    """Of groups that teach nothing: not computed, but in the denominator."""
    num_dead_tokens: int = 0
    num_rejected_tokens: int = 0
    """Left out since trainer and sampler disagree about them."""


def signals_of(verbs: Verbs, adapter_id: str, spec: JobSpec, groups: Sequence[GradedGroup]) -> list[FloatArray]:
    """Per group G advantages (FlowRL: offsets); 0 throughout where a group teaches nothing, NaN where a completion has no score.

    Overlong punishment and the KL term of kl_in reward are taken off the grader's rewards first. The policy that sampled is known by the
    sampler's own logprobs; the reference takes one pass, where it is needed here.
    """
    algorithm = spec.algorithm
    in_reward = algorithm.beta > 0 and algorithm.kl_in == "reward"
    own = [[completion.logprobs for completion in group.completions] for group in groups]
    ref: Logprobs = [[]] * len(groups)
    if in_reward or algorithm.name == "flowrl":
        plain = [_train_group(group, range(len(group.completions)), np.zeros(len(group.completions), np.float32)) for group in groups]
        ref = verbs.forward(adapter_id, plain, temperature=spec.rollout.temperature, reference=True)
    found: list[FloatArray] = []
    for group, own_G, ref_G in zip(groups, own, ref, strict=True):
        rewards = [
            reward if reward is None else reward + overlong_penalty(
                len(completion.tokens), max_tokens=spec.rollout.max_tokens, buffer_share=algorithm.overlong_buffer_share
            )
            for reward, completion in zip(group.rewards, group.completions, strict=True)
        ]  # fmt: skip
        if in_reward:
            rewards = rewards_less_kl(rewards, own_G, ref_G, beta=algorithm.beta)
        match algorithm.name:
            case "flowrl":
                found.append(flow_offsets(rewards, own_G, ref_G, reward_scale=algorithm.reward_scale))
            case "rloo":
                found.append(leave_one_out(rewards))
            case _:
                found.append(group_advantages(rewards, scale=algorithm.scale_advantages))
    return found


def batch_of(groups: Sequence[GradedGroup], signals: Sequence[FloatArray], *, mask_truncated: bool = False) -> Batch:
    """The completions that count, of the groups that teach.

    Completions without a score leave numerator and denominator alike, and so do truncated ones where they are masked; groups that teach
    nothing leave the numerator only.
    """
    batch: list[TrainGroup] = []
    num_completions = num_tokens = 0
    for group, signals_G in zip(groups, signals, strict=True):
        counted = [i for i in group.kept if len(group.completions[i].tokens)]
        if mask_truncated:
            counted = [i for i in counted if group.completions[i].finish_reason != "length"]
        if is_dead(signals_G):
            num_completions += len(counted)
            num_tokens += sum(len(group.completions[i].tokens) for i in counted)
        elif counted:
            batch.append(_train_group(group, counted, signals_G))
    return Batch(batch, num_completions, num_tokens)


def reject(batch: Batch, old_logprobs: Logprobs, *, cap: float) -> Batch:
    """Leaves out tokens whose trainer / sampler probability is outside [1 / cap, cap], and completions and groups of which nothing is left.

    Groups that teach nothing are not scored for this: they count in full.

    Args:
        old_logprobs: per group, per completion T values as the trainer gives them, nats.
    Source: masked importance sampling, as in IcePop (Ling team 2025, arXiv:2510.18855, eq. 4), whose bounds are of one's own choice.
    """
    kept: list[TrainGroup] = []
    num_rejected = 0
    for group, trainer_G in zip(batch.groups, old_logprobs, strict=True):
        assert group.sampler_logprobs is not None
        pairs = zip(trainer_G, group.sampler_logprobs, strict=True)
        masks = [(np.abs(trainer_T - sampler_T) <= math.log(cap)).astype(np.float32) for trainer_T, sampler_T in pairs]
        num_rejected += sum(int((mask_T == 0).sum()) for mask_T in masks)
        left = [i for i, mask_T in enumerate(masks) if mask_T.any()]
        if left:
            kept.append(
                TrainGroup(
                    group.prompt_tokens,
                    tuple(group.completions[i] for i in left),
                    group.advantages[left],
                    group.weights[left],
                    sampler_logprobs=tuple(group.sampler_logprobs[i] for i in left),
                    token_weights=tuple(masks[i] for i in left),
                )
            )
    return replace(batch, groups=kept, num_rejected_tokens=num_rejected)


def weighed(batch: Batch, aggregation: str, *, max_tokens: int) -> tuple[list[TrainGroup], float]:
    """The batch with its weights, and the denominator.

    Args:
        aggregation: "sequence": a token weighs 1 / its completion's length, the denominator is the number of completions;
            "token": 1, the number of tokens; "sum": 1, the number of completions; "constant": 1, that number times max_tokens.
            Tokens that are left out count nowhere.
    """
    lengths = [_lengths(group) for group in batch.groups]
    weights = [1 / lengths_G if aggregation == "sequence" else np.ones_like(lengths_G) for lengths_G in lengths]
    num_completions = sum(len(lengths_G) for lengths_G in lengths) + batch.num_dead_completions
    num_tokens = float(sum(lengths_G.sum() for lengths_G in lengths)) + batch.num_dead_tokens
    denominator = {
        "sequence": num_completions, "sum": num_completions, "token": num_tokens, "constant": num_completions * max_tokens,
    }[aggregation]  # fmt: skip
    groups = [replace(group, weights=weights_G.astype(np.float32)) for group, weights_G in zip(batch.groups, weights, strict=True)]
    return groups, float(denominator)


def loss_settings(algorithm: AlgorithmSettings, denominator: float, *, temperature: float) -> LossSettings:
    """The loss that an algorithm's name and settings stand for."""
    kind = _KINDS.get(algorithm.name, "clip")
    # A KL term in the reward is not in the loss once more.
    return LossSettings(
        clip_low=algorithm.clip_low,
        clip_high=algorithm.clip_high,
        beta=0.0 if algorithm.kl_in == "reward" else algorithm.beta,
        denominator=denominator,
        temperature=temperature,
        kind=kind,
        entropy_bonus=algorithm.entropy_bonus,
        importance_cap=algorithm.importance_cap,
    )


def _train_group(group: GradedGroup, indices: Sequence[int], signals_G: FloatArray) -> TrainGroup:
    chosen = [group.completions[i] for i in indices]
    return TrainGroup(
        group.prompt_tokens,
        tuple(completion.tokens for completion in chosen),
        signals_G[list(indices)],
        np.ones(len(chosen), np.float32),
        sampler_logprobs=tuple(completion.logprobs for completion in chosen),
    )


def _lengths(group: TrainGroup) -> FloatArray:
    """Tokens of each completion that count."""
    if group.token_weights is None:
        return np.array([len(tokens) for tokens in group.completions], np.float32)
    return np.array([mask_T.sum() for mask_T in group.token_weights], np.float32)

"""What a step says of itself."""

from collections.abc import Sequence

import numpy as np

from engine.advantages import is_dead
from engine.loop.objective import Batch
from engine.loop.rollout import Rollout
from engine.types import FloatArray, ForwardBackwardResult, OptimResult, TrainGroup


def rollout_metrics(rollout: Rollout, signals: Sequence[FloatArray]) -> dict[str, float]:
    """Rewards (completions with a score, of every group that was sampled, replaced ones included), lengths, truncation, dead groups.

    Args:
        signals: of the groups that are trained on; replaced groups are dead.
    """
    seen = rollout.seen
    rewards = np.array([group.grades[i].reward for group in seen for i in group.kept], dtype=np.float64)
    completions = [c for group in seen for c in group.completions]
    num_dead = sum(is_dead(signals_G) for signals_G in signals) + len(rollout.replaced)
    metrics = {
        "reward_mean": float(rewards.mean()),
        "reward_std": float(rewards.std(ddof=1)) if len(rewards) > 1 else 0.0,
        "completion_tokens_mean": float(np.mean([len(c.tokens) for c in completions])),
        "truncated_share": float(np.mean([c.finish_reason == "length" for c in completions])),
        "dead_group_share": num_dead / len(seen),
        "excluded_rows": float(rollout.num_excluded),
    }
    parts: dict[str, list[float]] = {}
    for group in seen:
        for result in group.grades:
            for name, value in result.sub_rewards.items():
                if value is not None:
                    parts.setdefault(name, []).append(value)
    return metrics | {f"reward/{name}": float(np.mean(values)) for name, values in parts.items()}


def sampling_cost(rollout: Rollout) -> dict[str, float]:
    """What dynamic sampling took beyond one round."""
    tokens = sum(len(c.tokens) for group in rollout.replaced for c in group.completions)
    return {
        "sampling_rounds": float(rollout.num_rounds),
        "replaced_groups": float(len(rollout.replaced)),
        "replaced_tokens": float(tokens),
    }


def rejected_share(batch: Batch) -> dict[str, float]:
    """Share of the live groups' tokens that importance_mode reject left out."""
    kept = sum(int(mask_T.sum()) for group in batch.groups for mask_T in group.token_weights or ())
    return {"rejected_share": batch.num_rejected_tokens / max(1, kept + batch.num_rejected_tokens)}


def update_metrics(results: Sequence[ForwardBackwardResult], updates: Sequence[OptimResult]) -> dict[str, float]:
    """Means over a step's updates; tokens are summed."""
    names = results[0].metrics
    metrics = {name: float(np.mean([result.metrics[name] for result in results])) for name in names}
    metrics["loss"] = float(np.mean([result.loss for result in results]))
    metrics["grad_norm"] = float(np.mean([update.grad_norm for update in updates]))
    metrics["num_tokens"] = float(sum(result.num_tokens for result in results))
    return metrics


def logprob_gap(groups: Sequence[TrainGroup], first: ForwardBackwardResult) -> dict[str, float]:
    """Mean and largest |sampler's logprob - trainer's|, nats, over the tokens that were trained on.

    Args:
        first: of the first update, before the policy moved.
    """
    gaps = [
        np.abs(ours - theirs)
        for group, logprobs in zip(groups, first.logprobs, strict=True)
        for ours, theirs in zip(group.sampler_logprobs or (), logprobs, strict=True)
    ]
    every = np.concatenate(gaps)
    return {"sampler_trainer_logprob_gap_mean": float(every.mean()), "sampler_trainer_logprob_gap_max": float(every.max())}

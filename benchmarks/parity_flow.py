"""FlowRL against GRPO on a target with many peaks that is known exactly: which of the two matches it, which climbs one peak.

The policy is a table: one logit a state, one state a completion. Losses, advantages and offsets are the engine's own. The reward of a state
is the logarithm of its target probability. FlowRL draws the policy towards exp(reward_scale * r_hat) times the reference, here uniform;
r_hat is the reward normalised by its group. With reward_scale the reward's standard deviation under the target, the target is exactly where
its residuals vanish.

Dimensions: V states, B completions of a group.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from benchmarks.machine import this_machine
from benchmarks.plots import IMAGES, plot_distributions, require_plots
from benchmarks.report import print_json, print_table
from core.contracts import AlgorithmSettings
from engine.advantages import flow_offsets, group_advantages
from engine.losses import LossInputs, packed_loss
from engine.types import LossSettings

NUM_STATES = 96
PEAKS = ((12, 3.0, 1.0), (30, 2.5, 0.7), (47, 3.5, 0.9), (66, 2.0, 0.6), (83, 4.0, 0.8))
"""Centre, width and height of each."""
FLOOR = 0.004
"""Lowest height, against the highest peak's 1: no state is impossible."""
GROUP_SIZE = 64
NUM_STEPS = 2000
LEARNING_RATE = 0.03


@dataclass(frozen=True)
class Matched:
    """What one algorithm made of the target."""

    name: str
    policy: tuple[float, ...]
    to_target: float
    """KL(policy || target), nats."""
    from_target: float
    """KL(target || policy), nats: great where the policy has given up on a peak."""
    num_peaks: int
    """Peaks that keep at least half of the mass that the target has there."""


def run_flow(*, quick: bool, as_json: bool, num_seeds: int) -> None:
    """Trains, prints, plots (not in --quick)."""
    if not quick:
        require_plots()
    steps = 60 if quick else NUM_STEPS
    target = target_distribution()
    names = ("flowrl", "grpo", "grpo with beta 0.04")
    runs = {name: [train(name, target, num_steps=steps, seed=seed) for seed in range(num_seeds)] for name in names}
    rows = [(name, *(float(np.mean([getattr(m, field) for m in matched])) for field in ("to_target", "from_target", "num_peaks")))
            for name, matched in runs.items()]  # fmt: skip
    title = (
        f"A target of {len(PEAKS)} peaks over {NUM_STATES} states, after {steps} steps of {GROUP_SIZE} samples, mean of {num_seeds} seeds"
    )
    print_table(title, ("algorithm", "KL(policy || target), nats", "KL(target || policy)", f"peaks kept, of {len(PEAKS)}"), rows)
    if not quick:
        _plot(target, [matched[0] for matched in runs.values()])
    if as_json:
        figures = {name: {"to_target": to, "from_target": back, "peaks_kept": kept} for name, to, back, kept in rows}
        flow, grpo = figures["flowrl"], figures["grpo"]
        fractions = {
            "kl_fraction": flow["to_target"] / grpo["to_target"],
            "kl_fraction_from_target": flow["from_target"] / grpo["from_target"],
        }
        print_json({**fractions, "algorithms": figures, "seeds": num_seeds, "machine": this_machine().as_json()})


def target_distribution() -> np.ndarray:
    """The target, V probabilities."""
    states = np.arange(NUM_STATES)
    heights = np.full(NUM_STATES, FLOOR)
    for centre, width, height in PEAKS:
        heights += height * np.exp(-(((states - centre) / width) ** 2) / 2)
    return heights / heights.sum()


def train(name: str, target: np.ndarray, *, num_steps: int, seed: int) -> Matched:
    """Trains a table from the uniform policy.

    Args:
        name: flowrl, grpo, or grpo with a KL term against the uniform start.
    """
    generator = torch.Generator().manual_seed(seed)
    logits_V = torch.zeros(NUM_STATES, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.Adam([logits_V], lr=LEARNING_RATE)
    rewards_V = np.log(target)
    reward_scale = float(np.sqrt(target @ (rewards_V - target @ rewards_V) ** 2))
    uniform = float(-np.log(NUM_STATES))
    average_V = torch.zeros_like(logits_V)
    for step in range(num_steps):
        logprobs_V = logits_V.log_softmax(0)
        drawn_B = torch.multinomial(logprobs_V.detach().exp(), GROUP_SIZE, replacement=True, generator=generator)
        rewards = [float(rewards_V[state]) for state in drawn_B.tolist()]
        inputs, settings = _loss(name, logprobs_V[drawn_B], rewards, uniform, reward_scale)
        optimizer.zero_grad()
        packed_loss(inputs, settings)[0].backward()
        optimizer.step()
        if step >= num_steps // 2:
            average_V += logits_V.detach().softmax(0) / (num_steps - num_steps // 2)
    # The mean policy of the second half: a single step's wobbles with the 64 states that it happened to draw.
    return _matched(name, average_V.numpy(), target)


def _loss(name: str, logprobs_B: Tensor, rewards: Sequence[float], uniform: float, reward_scale: float) -> tuple[LossInputs, LossSettings]:
    """One group, every completion one token long."""
    count = len(rewards)
    ref_B = torch.full((count,), uniform, dtype=torch.float64)
    if name == "flowrl":
        algorithm = AlgorithmSettings(name="flowrl")
        own = [np.array([value], np.float32) for value in logprobs_B.tolist()]
        reference = [np.array([uniform], np.float32)] * count
        values = flow_offsets(rewards, own, reference, reward_scale=reward_scale)
    else:
        algorithm = AlgorithmSettings(beta=0.04 if name.endswith("0.04") else 0.0)
        values = group_advantages(rewards, scale=algorithm.scale_advantages)
    kind = "flow" if name == "flowrl" else "clip"
    settings = LossSettings(algorithm.clip_low, algorithm.clip_high, algorithm.beta, float(count), 1.0, kind)
    inputs = LossInputs(
        logprobs_B, torch.from_numpy(values).to(torch.float64), torch.ones(count, dtype=torch.float64), (1,) * count,
        ref_N=ref_B if algorithm.beta > 0 else None,
    )  # fmt: skip
    return inputs, settings


def _matched(name: str, policy: np.ndarray, target: np.ndarray) -> Matched:
    policy = np.maximum(policy, 1e-300)
    states = np.arange(NUM_STATES)
    near = [np.abs(states - centre) <= 2 * width for centre, width, _ in PEAKS]
    return Matched(
        name, tuple(policy.tolist()), float(policy @ np.log(policy / target)), float(target @ np.log(target / policy)),
        sum(bool(policy[at].sum() >= 0.5 * target[at].sum()) for at in near),
    )  # fmt: skip


def _plot(target: np.ndarray, matched: Sequence[Matched], folder: Path = IMAGES) -> None:
    labels = {f"{m.name}, KL to the target {m.to_target:.2f}": m.policy for m in matched}
    plot_distributions(
        range(NUM_STATES), target.tolist(), labels, "flowrl_vs_grpo", "FlowRL matches the target, GRPO climbs", folder=folder
    )

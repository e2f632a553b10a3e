"""Rank, alpha and learning rate proposed from the model's size, the task and the data. Shown when a job is submitted, never imposed.

Sources, named in each reason:
- LoRA Without Regret (Schulman et al., Thinking Machines Lab, 2025): the best rate of LoRA is about 10 times full fine-tuning's, 15 times
  in runs of up to about 100 steps, and hardly depends on the rank where the update is scaled by alpha / rank with alpha 32; adapt all
  linear layers; RL learns about one bit an episode and a supervised token about one bit, a parameter holds about two; large batches cost
  LoRA more than full fine-tuning, whatever the rank. Rates fall with hidden size ** -0.781 (its fit over Llama models).
- verl's article: rank 16 to 32 under 10B parameters, 32 to 64 up to 50B, 64 to 128 beyond; a rate ten times full fine-tuning's.
- MindSpeed-RL's GRPO-LoRA: 3e-5 against full fine-tuning's 2e-6 on Qwen2.5-32B at rank 128, 32 prompts x 8 a step, equal curves.
- The article on GRPO after SFT: 1e-5 for the old LoRA under a new one at 5e-4.
"""

import math
from dataclasses import dataclass

from core.contracts import ALL_LINEAR, JobSpec

SIZES = ((10e9, 16, 32), (50e9, 32, 64), (math.inf, 64, 128))
"""verl's table: up to so many parameters, ranks from and to."""
ALPHA = 32.0
SHORT_RUN_STEPS = 100
FULL_RATES = {"rl": (2e-6, 6530), "sft": (5e-5, 2000)}
"""Rates of full fine-tuning at a hidden size (as `advise` estimates it): MindSpeed-RL's on Qwen2.5-32B; LoRA Without Regret's."""
DPO_FULL_RATE = 1e-6
"""TRL's default, at any size."""
RATE_EXPONENT = 0.781
MAX_SUPERVISED_RANK = 256
LARGE_BATCH = 1024
"""Completions a step; four times MindSpeed-RL's 32 x 8."""
FAR = 4.0
"""Asked and proposed differ by a factor of more than this: worth a warning. Rates within 3 of the best one learn about as well."""


@dataclass(frozen=True)
class Advice:
    """One proposal."""

    field: str
    """Of the job, dotted."""
    asked: float | str
    proposed: float | str
    reason: str
    warning: str | None = None
    """Said where what was asked is far from what is proposed."""

    def __str__(self) -> str:
        text = f"{self.field}: {_shown(self.proposed)} is proposed, {_shown(self.asked)} asked. {self.reason}"
        return text if self.warning is None else f"{text} {self.warning}"


def advise(spec: JobSpec, num_params: int, num_layers: int, num_rows: int) -> tuple[Advice, ...]:
    """Proposals for a job, asked beside proposed.

    Args:
        num_params: of the base, embeddings included.
        num_layers: decoder layers of the base.
        num_rows: of the training file.
    Returns:
        Learning rate always; rank and alpha where the job trains an adapter of a new shape; module kinds, batch and the rate of an adapter
        underneath where something is to be said.
    """
    hidden = math.sqrt(num_params / (12 * num_layers))  # a layer has about 12 hidden^2 weights
    num_steps = spec.total_steps(num_rows)
    found = [_rate(spec, hidden, num_steps)]
    if spec.lora.kind == "lora" and (spec.start_from is None or spec.start_mode == "stack"):
        found += [_rank(spec, num_params, hidden * num_layers, num_steps, num_rows), _alpha(spec), *_modules(spec)]
    return (*found, *_underneath(spec), *_batch(spec, num_rows))


def _full_rate(spec: JobSpec, hidden: float) -> tuple[float, str]:
    """Of full fine-tuning, and where that is from."""
    if spec.algorithm.name == "dpo":
        return DPO_FULL_RATE, "TRL's default"
    rate, at = FULL_RATES["sft" if spec.algorithm.name == "sft" else "rl"]
    origin = "LoRA Without Regret" if spec.algorithm.name == "sft" else "MindSpeed-RL's 2e-6 on 32B"
    return rate * (at / hidden) ** RATE_EXPONENT, f"{origin}, scaled by hidden size ** -{RATE_EXPONENT}"


def _rate(spec: JobSpec, hidden: float, num_steps: int) -> Advice:
    full, origin = _full_rate(spec, hidden)
    if spec.lora.kind == "full":
        times, why = 1, ""
    elif num_steps <= SHORT_RUN_STEPS:
        times, why = (
            15,
            f", times 15 for LoRA in a run of {num_steps} steps (LoRA Without Regret: 15 up to about {SHORT_RUN_STEPS}, then 10)",
        )
    else:
        times, why = 10, f", times 10 for LoRA (LoRA Without Regret) in a run of {num_steps} steps"
    proposed, asked = _rounded(full * times), spec.learning_rate
    reason = f"Full fine-tuning takes about {full:.1e} at this size ({origin}){why}; whatever the rank."
    warning = None
    if asked > FAR * proposed:
        warning = f"{asked:g} is {asked / proposed:.0f} times that; rewards that collapse after a few steps would come from it."
    elif asked < proposed / FAR:
        warning = f"{asked:g} is {proposed / asked:.0f} times less than that; the job may end before it has learned."
    return Advice("optimizer.learning_rate", asked, proposed, reason, warning)


def _rank(spec: JobSpec, num_params: int, hidden_layers: float, num_steps: int, num_rows: int) -> Advice:
    low, high = next((low, high) for most, low, high in SIZES if num_params < most)
    # All linear layers: 4 of attention and 3 of the MLP (about 3 hidden wide), inputs and outputs: about 20 hidden a layer and rank.
    bits_a_rank = 2 * 20 * hidden_layers
    if spec.algorithm.samples:
        bits = num_steps * spec.prompts_per_step(num_rows) * spec.group_size
        learned = f"{_count(bits)} episodes teach about a bit each"
        proposed, most = low, high
    else:
        bits = num_rows * spec.rollout.max_tokens
        learned = f"{num_rows} rows of at most {spec.rollout.max_tokens} tokens teach about a bit a token"
        most = MAX_SUPERVISED_RANK
        proposed = min(most, max(low, 2 ** math.ceil(math.log2(max(1.0, bits / bits_a_rank)))))
    budget = spec.lora.rank_budget
    asked, field = (spec.lora.max_rank, "lora.rank") if budget is None else (budget.mean_rank, "lora.rank_budget.mean_rank")
    reason = (
        f"{learned}, and each rank of this base holds {_count(bits_a_rank)} (LoRA Without Regret); verl takes {low} to {high} at its size."
    )
    warning = None
    if asked * bits_a_rank < bits:
        warning = f"At {asked:g} the adapter can hold less than that and would stop learning early."
    elif asked > FAR * most:
        warning = f"{asked:g} costs memory, time and transfer, and nothing says that it learns more."
    return Advice(field, asked, proposed, reason, warning)


def _alpha(spec: JobSpec) -> Advice:
    asked, rank = spec.lora.alpha, spec.lora.rank
    proposed = round(ALPHA / math.sqrt(rank), 1) if spec.lora.rslora else ALPHA
    reason = "The proposed learning rate is for an update scaled by 32 / rank, at any rank (LoRA Without Regret)"
    reason += f"; with rslora that is alpha {proposed:g} at rank {rank}." if spec.lora.rslora else "."
    warning = None
    if not proposed / FAR <= asked <= FAR * proposed:
        warning = f"alpha {asked:g} makes the update {asked / proposed:.2g} times as large; divide the learning rate by that."
    return Advice("lora.alpha", asked, proposed, reason, warning)


def _modules(spec: JobSpec) -> tuple[Advice, ...]:
    missing = [kind for kind in ALL_LINEAR if kind not in spec.lora.target_modules]
    if not missing:
        return ()
    warning = None
    if {"gate_proj", "up_proj", "down_proj"} <= set(missing):
        warning = "Without the MLP a LoRA learns worse even with as many parameters."
    return (
        Advice(
            "lora.target_modules", ", ".join(spec.lora.target_modules), "all linear layers",
            "Adapters on all linear layers learn as full fine-tuning does (LoRA Without Regret, verl).", warning,
        ),
    )  # fmt: skip


def _underneath(spec: JobSpec) -> tuple[Advice, ...]:
    if spec.start_mode != "stack" or spec.start_learning_rate == 0:
        return ()
    asked, proposed = spec.start_learning_rate, _rounded(spec.learning_rate / 50)
    reason = "The adapter underneath moves at a fiftieth of the new one's rate: 1e-5 under 5e-4 in the article on GRPO after SFT."
    warning = "What it knows from before may be lost." if asked > FAR * proposed else None
    return (Advice("start_learning_rate", asked, proposed, reason, warning),)


def _batch(spec: JobSpec, num_rows: int) -> tuple[Advice, ...]:
    a_row = spec.group_size if spec.algorithm.samples else 1
    completions = spec.prompts_per_step(num_rows) * a_row
    if completions <= LARGE_BATCH:
        return ()
    return (
        Advice(
            "hyperparameters.batch_size", spec.prompts_per_step(num_rows), max(1, LARGE_BATCH // a_row),
            f"A step has {completions} completions; MindSpeed-RL takes 32 x 8.",
            "Large batches cost LoRA more than full fine-tuning, and no rank mends it (LoRA Without Regret).",
        ),
    )  # fmt: skip


def _rounded(value: float) -> float:
    """To one significant digit, as people write rates."""
    return float(f"{value:.0e}")


def _count(number: float) -> str:
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return f"{number:.0f}"


def _shown(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:g}"

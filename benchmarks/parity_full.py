"""LoRA of rank 128 against full-parameter training of the same layers, on the demo's task.

After MindSpeed RL's GRPO-LoRA figure, on a small model: rank and alpha are its (128, 128), and so is the proportion of the learning rates
(full: one fifteenth of LoRA's).
"""

from functools import partial

from benchmarks.curves import compare, same, summary
from benchmarks.machine import this_machine
from benchmarks.options import base_models
from benchmarks.parity_arms import Arm, print_arms, run_arms
from benchmarks.plots import plot_curves, require_plots
from benchmarks.report import print_json
from benchmarks.workload import Workload, demo_workload
from core.contracts import LoraSettings

LORA_RATE = 3e-4
FULL_RATE = LORA_RATE / 15


def run_full(*, quick: bool, as_json: bool, num_seeds: int, num_steps: int) -> None:
    """Trains, prints, plots (not in --quick)."""
    if not quick:
        require_plots()
    machine = this_machine()
    arms = [
        Arm("LoRA r=128", partial(_workload, LoraSettings(rank=128, alpha=128.0), LORA_RATE, num_steps)),
        Arm("full parameters", partial(_workload, LoraSettings(kind="full"), FULL_RATE, num_steps)),
    ]
    with base_models(quick=quick) as (base, _):
        lora, full = run_arms(arms, base, machine, num_seeds=num_seeds)
    print_arms(f"LoRA r=128 against full parameters, {num_steps} steps of the demo's task, {num_seeds} seeds", [lora, full])
    comparisons = compare(lora.curves, full.curves)
    print(summary(comparisons, ("LoRA", "full")))
    if not quick:
        plot_curves([lora.curves, full.curves], "lora_vs_full", "LoRA r=128 against full-parameter training, the demo's task")
    if as_json:
        tests = {what: comparison.as_json() for what, comparison in comparisons.items()}
        arms_json = {"lora_r128": lora.as_json(), "full": full.as_json()}
        print_json({"same": int(same(comparisons)), "tests": tests, "arms": arms_json, "machine": machine.as_json()})


def _workload(lora: LoraSettings, learning_rate: float, num_steps: int, seed: int) -> Workload:
    return with_settings(demo_workload(seed=seed, num_steps=num_steps), lora=lora, learning_rate=learning_rate)


def with_settings(workload: Workload, *, lora: LoraSettings, learning_rate: float, **optimizer: object) -> Workload:
    """The same job with another adapter and learning rate."""
    changed = workload.spec.optimizer.model_copy(update={"learning_rate": learning_rate, **optimizer})
    spec = workload.spec.model_copy(update={"lora": lora, "optimizer": changed})
    return Workload(workload.rows, spec, workload.num_steps, workload.full_length)

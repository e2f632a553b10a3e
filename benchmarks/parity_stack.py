"""GRPO on the adapter that SFT made, against GRPO on a new LoRA over it: speed, memory, final reward, stability.

The start is a short supervised warm-up on the demo's answers. Then: `continue` trains that adapter; `stack, start frozen` puts a new one of
the same shape over it; `stack, both trained` trains the start too, at the rates that are recommended for it (start 1e-5, new 5e-4).
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.curves import compare, summary
from benchmarks.engine_process import engine_process
from benchmarks.machine import Machine, this_machine
from benchmarks.options import base_models
from benchmarks.parity_arms import Arm, print_arms, run_arms
from benchmarks.parity_full import with_settings
from benchmarks.plots import plot_curves, require_plots
from benchmarks.report import print_json
from benchmarks.workload import Workload, demo_workload
from core.contracts import LearningRateGroup, LoraSettings, OptimizerSettings
from engine.types import AdapterInfo, LossSettings, SavedAdapter, StackedOn, TrainGroup, Verbs

LORA = LoraSettings(rank=16, alpha=32.0)
SFT_STEPS = 3
SFT_ROWS = 8
SFT_RATE = 3e-4
CONTINUE_RATE = 3e-4
NEW_RATE = 5e-4
START_RATE = 1e-5


def run_stack(*, quick: bool, as_json: bool, num_seeds: int, num_steps: int) -> None:
    """Trains, prints, plots (not in --quick)."""
    if not quick:
        require_plots()
    machine = this_machine()
    with base_models(quick=quick) as (base, _):
        start = make_start(base, machine)
        arms = make_arms(start, num_steps)
        trained = run_arms(arms, base, machine, num_seeds=num_seeds)
    print_arms(f"GRPO after SFT ({SFT_STEPS} steps), {num_steps} steps of the demo's task, {num_seeds} seeds", trained)
    tests = {f"{other.curves.name} less continue": compare(other.curves, trained[0].curves) for other in trained[1:]}
    for name, comparisons in tests.items():
        print(f"{name}:\n{summary(comparisons, (name.removesuffix(' less continue'), 'continue'))}")
    if not quick:
        plot_curves([t.curves for t in trained], "continue_vs_stack", "GRPO on the SFT adapter, or on a new LoRA over it")
    if as_json:
        told = {name: {what: c.as_json() for what, c in comparisons.items()} for name, comparisons in tests.items()}
        print_json({"arms": {t.curves.name: t.as_json() for t in trained}, "tests": told, "machine": machine.as_json()})


def make_arms(start: SavedAdapter, num_steps: int) -> list[Arm]:
    """The three ways to go on from a start."""

    def going_on(verbs: Verbs, adapter_id: str) -> AdapterInfo:
        return verbs.create_adapter(adapter_id, LORA, seed=0, weights=start.weights)

    def stacked(trainable: bool, verbs: Verbs, adapter_id: str) -> AdapterInfo:
        return verbs.create_adapter(adapter_id, LORA, seed=0, under=StackedOn(start.weights, LORA, trainable))

    start_group = (LearningRateGroup(learning_rate=START_RATE, part="start"),)
    return [
        Arm("continue", partial(_workload, num_steps, CONTINUE_RATE, ()), going_on),
        Arm("stack, start frozen", partial(_workload, num_steps, NEW_RATE, ()), partial(stacked, False)),
        Arm("stack, both trained", partial(_workload, num_steps, NEW_RATE, start_group), partial(stacked, True)),
    ]


def make_start(base: Path, machine: Machine) -> SavedAdapter:
    """The supervised start, the same for all arms and seeds."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(base, local_files_only=True)
    rows = demo_workload().rows
    with engine_process(base, threads=machine.cores) as engine, engine.client() as client:
        client.create_adapter("start", LORA, seed=0)
        for step in range(SFT_STEPS):
            batch = rows[step * SFT_ROWS : (step + 1) * SFT_ROWS]
            groups = supervised_groups(client, tokenizer, batch)
            denominator = float(sum(len(group.completions[0]) for group in groups))
            client.forward_backward("start", groups, LossSettings(0.2, 0.2, 0.0, denominator, 1.0, "sft"))
            client.optim_step("start", OptimizerSettings(), learning_rate=SFT_RATE)
        return client.save("start")


def supervised_groups(verbs: Verbs, tokenizer: Any, rows: Sequence[dict[str, Any]]) -> list[TrainGroup]:
    """Prompts with their reference answers, each ended by the end of sequence."""
    prompts = verbs.render([row["messages"] for row in rows])
    answers = [[*tokenizer.encode(row["answer"], add_special_tokens=False), tokenizer.eos_token_id] for row in rows]
    return [
        TrainGroup(prompt, (np.array(answer, np.int32),), np.ones(1, np.float32), np.ones(1, np.float32))
        for prompt, answer in zip(prompts, answers, strict=True)
    ]


def _workload(num_steps: int, learning_rate: float, groups: tuple[LearningRateGroup, ...], seed: int) -> Workload:
    workload = demo_workload(seed=seed, num_steps=num_steps)
    return with_settings(workload, lora=LORA, learning_rate=learning_rate, learning_rate_groups=groups)

"""Several ways of training on the demo's task, each over the same seeds on engines of their own: curves, seconds and memory."""

import statistics
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from benchmarks.curves import Curves
from benchmarks.engine_process import engine_process
from benchmarks.job import Job, StepFigures
from benchmarks.machine import Machine
from benchmarks.measure import Spread
from benchmarks.report import print_table, say
from benchmarks.workload import Workload
from engine.types import AdapterInfo, Verbs


@dataclass(frozen=True)
class Arm:
    """One way."""

    name: str
    workload: Callable[[int], Workload]
    """The job of a seed."""
    create: Callable[[Verbs, str], AdapterInfo] | None = None
    """Makes its adapter; None takes a fresh one of the job's shape."""


@dataclass(frozen=True)
class Trained:
    """What an arm did."""

    curves: Curves
    step_s: Spread
    train_s: Spread
    """Of a step, forward, backward and optimizer alone."""
    completions_per_s: float
    peak_bytes: int
    num_params: int
    """That take gradients."""

    def as_json(self) -> dict[str, object]:
        """All figures."""
        return {
            "rewards": self.curves.rewards, "step_s": self.step_s.as_json(), "train_s": self.train_s.as_json(),
            "completions_per_s": self.completions_per_s, "peak_bytes": self.peak_bytes, "num_params": self.num_params,
            "final_reward": statistics.fmean(self.curves.finals()), "largest_fall": self.curves.roughness,
        }  # fmt: skip


def run_arms(arms: Sequence[Arm], base: Path, machine: Machine, *, num_seeds: int) -> list[Trained]:
    """Runs every arm with every seed, the arms in turns; the engines of the others idle meanwhile."""
    runs: list[list[list[StepFigures]]] = [[] for _ in arms]
    num_params = [0] * len(arms)
    with ExitStack() as stack:
        engines = [stack.enter_context(engine_process(base, threads=machine.cores)) for _ in arms]
        for seed in range(num_seeds):
            for place, arm in enumerate(arms):
                workload = arm.workload(seed)
                with engines[place].client() as client:
                    job = Job(client, workload, f"seed-{seed}", create=arm.create)
                    runs[place].append([job.run_step() for _ in range(workload.num_steps)])
                    num_params[place] = job.num_params
                    job.close()
                say(f"{arm.name}, seed {seed}: {' '.join(f'{step.reward_mean:.2f}' for step in runs[place][-1])}")
        peaks = [engine.peak_bytes for engine in engines]
    one = arms[0].workload(0)
    num_completions = one.spec.prompts_per_step(len(one.rows)) * one.spec.group_size
    return [_trained(arm.name, runs[i], peaks[i], num_params[i], num_completions) for i, arm in enumerate(arms)]


def print_arms(title: str, trained: Sequence[Trained]) -> None:
    """Speed, memory, final reward and stability of each arm."""
    rows = [
        (t.curves.name, str(t.step_s), str(t.train_s), t.completions_per_s, t.peak_bytes / 2**30, f"{t.num_params:,}",
         statistics.fmean(t.curves.finals()), statistics.stdev(t.curves.finals()) if len(t.curves.rewards) > 1 else 0.0, t.curves.roughness)
        for t in trained
    ]  # fmt: skip
    headings = ("", "step, s", "of it training", "completions/s", "peak GiB", "trained parameters", "final reward", "its SD over seeds",
                "largest fall")  # fmt: skip
    print_table(title, headings, rows)


def _trained(name: str, runs: Sequence[Sequence[StepFigures]], peak_bytes: int, num_params: int, num_completions: int) -> Trained:
    flat = [step for run in runs for step in run]
    step_s = Spread(tuple(step.seconds for step in flat))
    train_s = Spread(tuple(step.parts_s.get("train", 0.0) for step in flat))
    curves = Curves(name, tuple(tuple(step.reward_mean for step in run) for run in runs))
    return Trained(curves, step_s, train_s, num_completions * len(flat) / sum(step_s.values), peak_bytes, num_params)

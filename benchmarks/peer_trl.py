"""TRL's GRPOTrainer with PEFT on our workloads, told what to do in JSON lines. Runs in the peer's interpreter only (deploy/peers).

It is stock: the subclass below reads clocks and passes everything on. Same model folder, rows in the same order, the same reward code.

Messages in, one answer each: {"do": "begin", base_model, workload, settings}, then {"do": "step"} as often as the workload has steps.
"""

import json
import os
import sys
import time
from collections import defaultdict
from importlib.metadata import version
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from transformers.utils import logging
from trl import GRPOConfig, GRPOTrainer

from benchmarks.job import prompts_digest, rows_in_order
from benchmarks.workload import Workload
from engine.graders import grade

PACKAGES = ("trl", "peft", "transformers", "torch")


class Wire:
    """JSON lines on what were standard input and output; whatever else prints goes to standard error."""

    def __init__(self) -> None:
        self._out = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)

    def hear(self) -> dict[str, Any] | None:
        """The next message; None when there are no more."""
        line = sys.stdin.readline()
        return json.loads(line) if line else None

    def tell(self, message: dict[str, Any]) -> None:
        """Answers."""
        self._out.write(json.dumps(message) + "\n")
        self._out.flush()


class Clock:
    """What the step under way has taken so far."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Begins a step."""
        self.started = time.perf_counter()
        self.parts_s: dict[str, float] = defaultdict(float)
        self.rewards: list[float] = []
        self.lengths: list[int] = []
        self.prompts: list[list[int]] = []


class TimedTrainer(GRPOTrainer):  # pyright: ignore[reportUntypedBaseClass]
    """GRPOTrainer that tells the seconds of its parts."""

    clock: Clock

    def _generate_single_turn(self, prompt_ids: Any, *rest: Any, **named: Any) -> Any:
        self.clock.prompts = list(prompt_ids)
        started = time.perf_counter()
        result = super()._generate_single_turn(prompt_ids, *rest, **named)
        self.clock.parts_s["generate"] += time.perf_counter() - started
        self.clock.lengths = [len(completion) for completion in result[0]]
        return result

    def _get_per_token_logps_and_entropies(self, *rest: Any, **named: Any) -> Any:
        part = "forward" if torch.is_grad_enabled() else "reference"
        started = time.perf_counter()
        result = super()._get_per_token_logps_and_entropies(*rest, **named)
        self.clock.parts_s[part] += time.perf_counter() - started
        return result


class StepByStep(TrainerCallback):
    """Holds the trainer before each optimizer step until it is asked for, and answers after it."""

    def __init__(self, wire: Wire, clock: Clock) -> None:
        self._wire, self._clock = wire, clock

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Waits. Nothing of the step was done yet but drawing its rows."""
        if self._wire.hear() is None:
            os._exit(0)
        self._clock.clear()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Answers, after the optimizer's step."""
        clock = self._clock
        self._wire.tell({
            "seconds": time.perf_counter() - clock.started, "parts_s": dict(clock.parts_s),
            "reward_mean": sum(clock.rewards) / len(clock.rewards), "completion_tokens": sum(clock.lengths) / len(clock.lengths),
            "prompts_digest": prompts_digest(clock.prompts),
        })  # fmt: skip


def make_trainer(base_model: str, workload: Workload, settings: dict[str, Any], clock: Clock, callback: TrainerCallback) -> TimedTrainer:
    """The trainer that does what `engine.grpo` does with the same workload."""
    torch.set_num_threads(settings["threads"])
    torch.manual_seed(settings["seed"])
    spec = workload.spec
    algorithm, optimizer = spec.algorithm, spec.optimizer
    num_sequences = spec.prompts_per_step(len(workload.rows)) * spec.group_size
    micro_batch = min(settings["micro_batch"], num_sequences)
    config = GRPOConfig(
        output_dir="out", use_cpu=True, report_to=[], save_strategy="no", disable_tqdm=True, logging_strategy="no", seed=settings["seed"],
        bf16=settings["precision"] != "float32", gradient_checkpointing=settings["checkpointing"],
        per_device_train_batch_size=micro_batch, gradient_accumulation_steps=num_sequences // micro_batch,
        num_generations=spec.group_size, max_completion_length=spec.rollout.max_tokens, temperature=spec.rollout.temperature,
        generation_kwargs={"min_new_tokens": spec.rollout.max_tokens} if workload.full_length else None,
        max_steps=workload.num_steps, shuffle_dataset=False,
        beta=algorithm.beta, epsilon=algorithm.clip_low, epsilon_high=algorithm.clip_high, loss_type="grpo", scale_rewards="group",
        learning_rate=optimizer.learning_rate, lr_scheduler_type="constant", adam_beta1=optimizer.beta1, adam_beta2=optimizer.beta2,
        adam_epsilon=optimizer.eps, weight_decay=optimizer.weight_decay, max_grad_norm=optimizer.max_grad_norm,
    )  # fmt: skip
    dtype = torch.bfloat16 if settings["precision"] == "bfloat16_weights" else torch.float32
    rows = workload.rows
    dataset = Dataset.from_list([{"prompt": rows[i]["messages"], "row": i} for i in rows_in_order(workload)])

    def reward(completions: Any, row: Any, **_: Any) -> list[float]:
        started = time.perf_counter()
        grades = [grade(spec.grader, item=rows[i], output_text=c[0]["content"]) for c, i in zip(completions, row, strict=True)]
        clock.rewards = [g.reward if g.reward is not None else 0.0 for g in grades]
        clock.parts_s["reward"] += time.perf_counter() - started
        return clock.rewards

    trainer = TimedTrainer(
        model=AutoModelForCausalLM.from_pretrained(base_model, dtype=dtype), args=config, train_dataset=dataset, reward_funcs=reward,
        processing_class=AutoTokenizer.from_pretrained(base_model), callbacks=[callback],
        peft_config=LoraConfig(
            r=spec.lora.rank, lora_alpha=int(spec.lora.alpha), target_modules=list(spec.lora.target_modules), task_type="CAUSAL_LM"
        ),
    )  # fmt: skip
    trainer.clock = clock
    backward = trainer.accelerator.backward

    def timed_backward(*rest: Any, **named: Any) -> None:
        started = time.perf_counter()
        backward(*rest, **named)
        clock.parts_s["backward"] += time.perf_counter() - started

    trainer.accelerator.backward = timed_backward
    return trainer


def main() -> None:
    """Serves one workload."""
    logging.set_verbosity_error()
    wire, clock = Wire(), Clock()
    message = wire.hear()
    if message is None:
        return
    workload = Workload.from_json(message["workload"])
    trainer = make_trainer(message["base_model"], workload, message["settings"], clock, StepByStep(wire, clock))
    wire.tell({"versions": {name: version(name) for name in PACKAGES}})
    trainer.train()


if __name__ == "__main__":
    main()

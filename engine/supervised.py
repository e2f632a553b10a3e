"""Learning from answers that are given: sft, dpo, and the supervised warm-up of a job that goes on by rewards.

A step is forward_backward and optim_step on the rows' answers; nothing is sampled. Which rows follow from (job seed, step).
"""

import time
from collections.abc import Callable, Sequence
from itertools import islice

import numpy as np

from core.contracts import AlgorithmSettings, JobSpec
from engine.loop.curriculum import Curriculum, Memory
from engine.loop.evaluation import is_due
from engine.loop.metrics import update_metrics
from engine.loop.objective import Batch, loss_settings, weighed
from engine.loop.rows import PromptRow, StepResult, rows_of_step
from engine.loop.schedule import learning_rate_at, num_updates, optimizer_of
from engine.types import FloatArray, TrainGroup, Verbs


class SupervisedLoop:
    """One job of sft or dpo, step by step. It holds no state that matters but the curriculum's memory.

    Args:
        verbs: the engine.
        adapter_id: the job's adapter there, created or restored by the caller.
        spec: what the job asked for.
        rows, validation_rows: rows with answers, in file order.
        num_steps: steps of the whole job.
        between: called between the phases of a step; may raise to stop it (a lost lease, say).
        memory: `memory()` at the step from which the job goes on.
    """

    def __init__(
        self,
        verbs: Verbs,
        adapter_id: str,
        spec: JobSpec,
        rows: Sequence[PromptRow],
        validation_rows: Sequence[PromptRow],
        num_steps: int,
        between: Callable[[], None] = lambda: None,
        memory: Memory = (),
    ) -> None:
        self._verbs, self._adapter_id, self._spec, self._num_steps = verbs, adapter_id, spec, num_steps
        self._rows, self._validation_rows, self._between = rows, validation_rows[: spec.eval_samples], between
        self._curriculum = Curriculum(spec, rows, num_steps, memory)

    def begin(self, fingerprint: str) -> None:
        """Nothing is sampled, so there is no sampler to bring up to date."""

    def run_step(self, step: int) -> StepResult:
        """Does step `step` (0 for the first).

        Raises:
            Unavailable, NotFound, LeaseLost: the engine's; the step has to be done again from a checkpoint.
        """
        num_rows = self._spec.prompts_per_step(len(self._rows))
        indices = list(islice(self._curriculum.rows_of(step), num_rows))
        result = learn(
            self._verbs, self._adapter_id, self._spec, [self._rows[index] for index in indices], step, self._spec.algorithm,
            learning_rate=learning_rate_at(step, self._spec, self._num_steps), num_steps=self._num_steps, between=self._between,
        )  # fmt: skip
        for index in indices:
            self._curriculum.observe(index, None)
        return result

    def wants_eval(self, steps_done: int) -> bool:
        """Whether the validation file is due."""
        return bool(self._validation_rows) and is_due(self._spec, steps_done, self._num_steps)

    def evaluate(self) -> dict[str, float]:
        """Loss on the validation rows, without gradients: {"eval_loss": nats a token, or a pair's loss in dpo; dpo: "eval_accuracy"}."""
        groups = answer_groups(self._verbs, self._validation_rows)
        policy = self._verbs.forward(self._adapter_id, groups, temperature=1.0)
        if self._spec.algorithm.name == "sft":
            return {"eval_loss": -float(np.mean(np.concatenate([values for group in policy for values in group])))}
        reference = self._verbs.forward(self._adapter_id, groups, temperature=1.0, reference=True)
        margins = np.array([_margin(*pair) for pair in zip(policy, reference, strict=True)]) * self._spec.algorithm.beta
        # -log sigmoid(margin), arXiv:2305.18290, eq. 7.
        return {"eval_loss": float(np.mean(np.logaddexp(0.0, -margins))), "eval_accuracy": float(np.mean(margins > 0))}

    def memory(self) -> Memory:
        """What a loop that goes on from here has to be given."""
        return self._curriculum.memory()


def warm_up(
    verbs: Verbs, adapter_id: str, spec: JobSpec, rows: Sequence[PromptRow], step: int, num_steps: int, between: Callable[[], None]
) -> StepResult:
    """Step `step` (0 for the first) of the warm-up: cross-entropy on the rows' reference answers, by epochs, at a constant rate.

    After the last one a new phase begins: the reference policy of what follows is the policy that the warm-up made, so KL begins at 0.
    """
    settings = spec.warm_up
    indices = rows_of_step(spec.seed, len(rows), min(settings.batch_size, len(rows)), step)
    result = learn(
        verbs, adapter_id, spec, [rows[index] for index in indices], step, AlgorithmSettings(name="sft"),
        learning_rate=settings.learning_rate, num_steps=num_steps, between=between,
    )  # fmt: skip
    if step + 1 == settings.steps:
        verbs.new_phase(adapter_id)
    return result


def learn(
    verbs: Verbs,
    adapter_id: str,
    spec: JobSpec,
    rows: Sequence[PromptRow],
    step: int,
    algorithm: AlgorithmSettings,
    *,
    learning_rate: float,
    num_steps: int,
    between: Callable[[], None],
) -> StepResult:
    """One optimizer step on the answers of these rows."""
    started = time.perf_counter()
    groups = answer_groups(verbs, rows)
    between()
    denominator = float(len(groups))  # dpo's counts pairs, and a token's weight is its factor in the pair's log-ratios
    if algorithm.name == "sft":
        groups, denominator = weighed(Batch(groups), algorithm.loss_aggregation, max_tokens=spec.rollout.max_tokens)
    result = verbs.forward_backward(adapter_id, groups, loss_settings(algorithm, denominator, temperature=1.0))
    between()
    update = verbs.optim_step(adapter_id, optimizer_of(spec), learning_rate=learning_rate, total_steps=num_updates(spec, num_steps))
    seconds = time.perf_counter() - started
    metrics = update_metrics([result], [update]) | {"learning_rate": learning_rate, "train_s": seconds, "step_s": seconds}
    metrics["tokens_per_s"] = result.num_tokens / seconds
    return StepResult(step + 1, metrics, update.fingerprint)


def answer_groups(verbs: Verbs, rows: Sequence[PromptRow]) -> list[TrainGroup]:
    """The rows as batches: the prompt, and its answers as completions (dpo: the preferred one first)."""
    prompts = verbs.render([row.messages for row in rows])
    answers = verbs.render_answers(
        [[*row.messages, {"role": "assistant", "content": answer}] for row in rows for answer in row.answers]
    )  # fmt: skip
    groups: list[TrainGroup] = []
    for row, prompt in zip(rows, prompts, strict=True):
        own, answers = tuple(answers[: len(row.answers)]), answers[len(row.answers) :]
        groups.append(TrainGroup(prompt, own, np.zeros(len(own), np.float32), np.ones(len(own), np.float32)))
    return groups


def _margin(policy: Sequence[FloatArray], reference: Sequence[FloatArray]) -> float:
    preferred, other = (
        float(np.sum(own, dtype=np.float64) - np.sum(ref, dtype=np.float64)) for own, ref in zip(policy, reference, strict=True)
    )
    return preferred - other

"""Training by rewards as one loop over the verbs: sample, grade, signals, forward_backward, optim_step, sync.

GRPO (Shao et al. 2024, arXiv:2402.03300) and its relatives are one loop: they differ in the signal that a completion's reward becomes
(`engine.loop.objective.signals_of`), in what a token weighs (`weighed`) and in the loss (`engine.losses`). docs/algorithms.md has the list.

How the loop departs from the papers: one update per rollout unless updates_per_rollout says more, so a step is strictly on policy and needs
no old-policy pass; groups that teach nothing are not trained on, not even for their KL term or entropy, and still count in the denominator.

Everything that is random follows from (job seed, step, row, completion), so a run that is resumed at step s does what an unbroken one does.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from core.contracts import JobSpec
from core.errors import Unavailable
from engine.graders import grade
from engine.loop.curriculum import Curriculum, Memory
from engine.loop.evaluation import is_due
from engine.loop.metrics import logprob_gap, rejected_share, rollout_metrics, sampling_cost, update_metrics
from engine.loop.objective import Batch, batch_of, loss_settings, reject, signals_of, weighed
from engine.loop.rollout import count_excluded, roll_out, sampling_params
from engine.loop.rows import PromptRow, StepResult, rows_of_step
from engine.loop.schedule import learning_rate_at, num_updates, optimizer_of
from engine.supervised import warm_up
from engine.types import ForwardBackwardResult, OptimResult, SampleRequest, Verbs

__all__ = ["GrpoLoop", "PromptRow", "StepResult", "rows_of_step"]


class GrpoLoop:
    """One job's training, step by step. It holds no state but the adapter's fingerprint and the curriculum's memory.

    Args:
        verbs: the engine.
        adapter_id: the job's adapter there, created or restored by the caller.
        spec: what the job asked for.
        rows, validation_rows: prompts of the files, in file order.
        num_steps: steps of the whole job, those of a supervised warm-up included.
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
        self._curriculum = Curriculum(spec, rows, num_steps - spec.warm_up.steps, memory)
        self._fingerprint: str | None = None

    def begin(self, fingerprint: str) -> None:
        """Makes the sampler hold the adapter as the trainer has it; call after create_adapter or load_state.

        Raises:
            Unavailable: it holds something else.
        """
        self._sync(fingerprint)

    def run_step(self, step: int) -> StepResult:
        """Does step `step` (0 for the first).

        Raises:
            InvalidInput: too many completions without a score (code grader_failed, with the grader's own error).
            Unavailable, NotFound, LeaseLost: the engine's; the step has to be done again from a checkpoint.
        """
        num_first = self._spec.warm_up.steps
        if step >= num_first:
            return replace(self._learn_by_rewards(step - num_first), step=step + 1)
        result = warm_up(self._verbs, self._adapter_id, self._spec, self._rows, step, self._num_steps, self._between)
        self._sync(result.fingerprint)
        return result

    def wants_eval(self, steps_done: int) -> bool:
        """Whether the validation file is due."""
        return bool(self._validation_rows) and is_due(self._spec, steps_done, self._num_steps)

    def evaluate(self) -> dict[str, float]:
        """Greedy, one completion per validation row: {"eval_reward_mean": …, "eval_excluded_rows": …}.

        Raises:
            InvalidInput: as `run_step`.
        """
        params = replace(sampling_params(self._spec.rollout, seed=0), temperature=0.0, top_p=1.0)
        prompts = self._verbs.render([row.messages for row in self._validation_rows])
        completions = self._verbs.sample(self._adapter_id, [SampleRequest(prompt, (params,)) for prompt in prompts])
        pairs = zip(self._validation_rows, completions, strict=True)
        grades = [grade(self._spec.grader, item=row.item, output_text=done[0].text) for row, done in pairs]
        num_excluded = count_excluded(grades)
        rewards = [g.reward for g in grades if g.reward is not None]
        return {"eval_reward_mean": float(np.mean(rewards)), "eval_excluded_rows": float(num_excluded)}

    def memory(self) -> Memory:
        """What a loop that goes on from here has to be given."""
        return self._curriculum.memory()

    def _learn_by_rewards(self, step: int) -> StepResult:
        """Step `step` (0 for the first after the warm-up)."""
        fingerprint = self._fingerprint
        assert fingerprint is not None, "begin() comes first: sampling before a sync could use stale weights"
        spec, started = self._spec, time.perf_counter()
        rollout = roll_out(self._verbs, self._adapter_id, spec, self._rows, self._curriculum.rows_of(step), step, self._between)
        self._between()
        train_started = time.perf_counter()
        signals = signals_of(self._verbs, self._adapter_id, spec, rollout.groups)
        batch = batch_of(rollout.groups, signals, mask_truncated=spec.algorithm.mask_truncated)
        rate = learning_rate_at(step, spec, self._num_steps - spec.warm_up.steps)
        metrics = rollout_metrics(rollout, signals)
        metrics |= {"learning_rate": rate, "loss": 0.0, "grad_norm": 0.0, "num_tokens": 0.0}
        if spec.algorithm.dynamic_sampling:
            metrics |= sampling_cost(rollout)
        if batch.groups and spec.algorithm.importance_mode == "reject":
            batch = self._without_rejected(batch)
            metrics |= rejected_share(batch)
        if batch.groups:
            results, updates = self._update(batch, rate)
            metrics |= update_metrics(results, updates) | logprob_gap(batch.groups, results[0])
            fingerprint = updates[-1].fingerprint
        self._sync(fingerprint)
        for group in rollout.seen:
            self._curriculum.observe(group.row, group.mean_reward)
        ended = time.perf_counter()
        metrics |= {"rollout_s": rollout.sample_s, "grade_s": rollout.grade_s}
        metrics |= {"train_s": ended - train_started, "step_s": ended - started}
        num_sampled = sum(len(c.tokens) for group in rollout.seen for c in group.completions)
        metrics["tokens_per_s"] = (num_sampled + metrics["num_tokens"]) / (ended - started)
        return StepResult(step + 1, metrics, fingerprint)

    def _update(self, batch: Batch, rate: float) -> tuple[list[ForwardBackwardResult], list[OptimResult]]:
        """updates_per_rollout optimizer steps on one batch. The first one's logprobs are those of the policy that sampled."""
        spec = self._spec
        groups, denominator = weighed(batch, spec.algorithm.loss_aggregation, max_tokens=spec.rollout.max_tokens)
        loss = loss_settings(spec.algorithm, denominator, temperature=spec.rollout.temperature)
        if loss.importance_cap is None:
            groups = [replace(group, sampler_logprobs=None) for group in groups]
        results: list[ForwardBackwardResult] = []
        updates: list[OptimResult] = []
        for update in range(spec.algorithm.updates_per_rollout):
            if update == 1:
                groups = [replace(group, old_logprobs=old) for group, old in zip(groups, results[0].logprobs, strict=True)]
            results.append(self._verbs.forward_backward(self._adapter_id, groups, loss))
            self._between()
            total_steps = num_updates(spec, self._num_steps)
            updates.append(self._verbs.optim_step(self._adapter_id, optimizer_of(spec), learning_rate=rate, total_steps=total_steps))
        return results, updates

    def _without_rejected(self, batch: Batch) -> Batch:
        algorithm = self._spec.algorithm
        assert algorithm.importance_cap is not None, "validated with the mode"
        old = self._verbs.forward(self._adapter_id, batch.groups, temperature=self._spec.rollout.temperature)
        return reject(batch, old, cap=algorithm.importance_cap)

    def _sync(self, fingerprint: str) -> None:
        held = self._verbs.sync(self._adapter_id)
        if held != fingerprint:
            raise Unavailable(
                f"The sampler holds adapter {held[:12]}, the trainer {fingerprint[:12]}; the step is not sampled from stale weights."
            )
        self._fingerprint = fingerprint

"""One job of ours: the real loop (`engine.grpo`) over an engine host's verbs, a step at a time."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256

from benchmarks.workload import Conversation, CountTokens, Workload
from engine.grpo import GrpoLoop, PromptRow, rows_of_step
from engine.types import AdapterInfo, IntArray, Verbs

PARTS = {"generate": "rollout_s", "reward": "grade_s", "train": "train_s"}
"""Parts of a step by the names that both sides share, and the loop's metrics that hold their seconds."""


@dataclass(frozen=True)
class StepFigures:
    """One step of either side."""

    seconds: float
    """Of the whole step, by the wall."""
    parts_s: Mapping[str, float]
    """Seconds of its parts: generate, reward, and train or reference, forward, backward."""
    reward_mean: float
    completion_tokens: float
    """Mean over the completions sampled."""
    trained_share: float
    """Of the completion tokens sampled: 1 but where groups are dead and ours skips them."""
    prompts_digest: str
    """Of the step's prompts as token ids, whatever their order: equal on both sides, or they did not train on the same."""


class Job:
    """A job on an adapter of its own.

    Args:
        verbs: an engine client, or something that stands in for one.
        adapter_id: made here.
        create: makes it; None takes a fresh one of the workload's shape.
    """

    def __init__(
        self, verbs: Verbs, workload: Workload, adapter_id: str = "bench", *, create: Callable[[Verbs, str], AdapterInfo] | None = None
    ) -> None:
        self._verbs, self._workload, self._adapter_id = verbs, workload, adapter_id
        self._rows = [_prompt_row(row) for row in workload.rows]
        spec = workload.spec
        self._loop = GrpoLoop(verbs, adapter_id, spec, self._rows, (), workload.num_steps)
        self._step = 0
        made = create(verbs, adapter_id) if create else verbs.create_adapter(adapter_id, spec.lora, seed=spec.seed)
        self.num_params = made.num_params
        self._loop.begin(made.fingerprint)

    def run_step(self) -> StepFigures:
        """The next step."""
        started = time.perf_counter()
        result = self._loop.run_step(self._step)
        seconds = time.perf_counter() - started
        digest = prompts_digest(self._verbs.render([row.messages for row in self._step_rows()]))
        self._step += 1
        parts = {part: result.metrics[name] for part, name in PARTS.items() if name in result.metrics}
        spec, mean_tokens = self._workload.spec, result.metrics["completion_tokens_mean"]
        sampled = mean_tokens * spec.prompts_per_step(len(self._rows)) * spec.group_size
        share = result.metrics["num_tokens"] / sampled
        return StepFigures(seconds, parts, result.metrics["reward_mean"], mean_tokens, share, digest)

    def close(self) -> None:
        """Frees the adapter."""
        self._verbs.drop_adapter(self._adapter_id)

    def _step_rows(self) -> list[PromptRow]:
        spec, num_rows = self._workload.spec, len(self._rows)
        return [self._rows[i] for i in rows_of_step(spec.seed, num_rows, spec.prompts_per_step(num_rows), self._step)]


def rows_in_order(workload: Workload) -> list[int]:
    """Indices of the rows of all steps, in the order in which the loop meets them."""
    spec, num_rows = workload.spec, len(workload.rows)
    a_step = spec.prompts_per_step(num_rows)
    return [index for step in range(workload.num_steps) for index in rows_of_step(spec.seed, num_rows, a_step, step)]


def prompts_digest(prompts: Sequence[Sequence[int] | IntArray]) -> str:
    """SHA-256 of a set of prompts."""
    return sha256(repr(sorted({tuple(map(int, prompt)) for prompt in prompts})).encode()).hexdigest()


def token_counter(verbs: Verbs) -> CountTokens:
    """Counts a conversation's tokens by the engine's own chat template."""

    def count(conversations: Sequence[Conversation]) -> list[int]:
        return [len(tokens) for tokens in verbs.render(conversations)]

    return count


def _prompt_row(row: Mapping[str, object]) -> PromptRow:
    item = {name: value for name, value in row.items() if name != "messages"}
    return PromptRow(tuple(row["messages"]), item)  # type: ignore[arg-type]

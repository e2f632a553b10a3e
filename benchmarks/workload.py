"""What both sides train on, in a form that crosses to the peer's interpreter as JSON. No torch here."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from cli.demo_task import make_task
from core.contracts import AlgorithmSettings, JobSpec, LoraSettings, OptimizerSettings, ReinforcementSettings, RolloutSettings
from core.contracts.graders import TextSimilarityGrader
from core.contracts.training import Hyperparameters

Conversation = Sequence[Mapping[str, Any]]
CountTokens = Callable[[Sequence[Conversation]], list[int]]
"""Tokens of each conversation as the base's chat template renders it, the assistant's turn opened."""

FILLER = " please"
SYSTEM = "You are a careful clerk."


@dataclass(frozen=True)
class Workload:
    """A GRPO job's rows and settings."""

    rows: tuple[dict[str, Any], ...]
    """A training file's rows: `messages`, and the fields that the grader reads."""
    spec: JobSpec
    num_steps: int
    """Steps that there are rows and a schedule for."""
    full_length: bool
    """Whether every completion has max_tokens tokens (no token ends one)."""

    def as_json(self) -> dict[str, Any]:
        """The form that crosses to the peer."""
        return {**asdict(self), "spec": self.spec.model_dump(mode="json")}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "Workload":
        """Reads it back."""
        return cls(tuple(values["rows"]), JobSpec.model_validate(values["spec"]), values["num_steps"], values["full_length"])


def fixed_workload(
    *, num_prompts: int, group_size: int, prompt_tokens: int, completion_tokens: int, num_steps: int, count_tokens: CountTokens,
    beta: float = 0.04, rank: int = 16,
) -> Workload:  # fmt: skip
    """Prompts of one exact length and completions of one exact length; texts differ, so no group dies.

    Args:
        num_prompts: prompts a step.
        prompt_tokens: of each, template included.
        count_tokens: see CountTokens.
    Raises:
        ValueError: the prompts can't be had at that length.
    """
    count = num_prompts * num_steps
    messages = exact_conversations(count, prompt_tokens, count_tokens)
    rows = tuple({"messages": m, "reference": f"{i} boxes are left in hall {i % 7}."} for i, m in enumerate(messages))
    grader = TextSimilarityGrader(
        type="text_similarity", name="close", input="{{sample.output_text}}", reference="{{item.reference}}",
        evaluation_metric="fuzzy_match",
    )  # fmt: skip
    spec = JobSpec(
        base_model="base", training_file_sha256="0" * 64, seed=3, num_steps=num_steps,
        reinforcement=ReinforcementSettings(grader=grader, hyperparameters=Hyperparameters(batch_size=num_prompts)),
        lora=LoraSettings(rank=rank, alpha=2.0 * rank), algorithm=AlgorithmSettings(group_size=group_size, beta=beta),
        rollout=RolloutSettings(max_tokens=completion_tokens), optimizer=OptimizerSettings(learning_rate=1e-4),
    )  # fmt: skip
    return Workload(rows, spec, num_steps, full_length=True)


def demo_workload(*, seed: int | None = None, num_steps: int | None = None, num_prompts: int | None = None) -> Workload:
    """The demo's job as it is; a seed of one's own for repeats, and fewer steps or prompts a step where time is short."""
    task = make_task() if num_steps is None else make_task(num_steps=num_steps)
    hyperparameters = Hyperparameters(batch_size=num_prompts or "auto")
    spec = JobSpec(
        base_model="base", training_file_sha256="0" * 64, seed=task.seed if seed is None else seed, num_steps=task.num_steps,
        reinforcement=ReinforcementSettings(grader=task.grader, hyperparameters=hyperparameters), lora=task.lora,
        algorithm=task.algorithm, rollout=task.rollout, optimizer=task.optimizer,
    )  # fmt: skip
    return Workload(task.training_rows, spec, task.num_steps, full_length=False)


def exact_conversations(count: int, prompt_tokens: int, count_tokens: CountTokens) -> list[list[dict[str, str]]]:
    """Different conversations that all render to the same number of tokens, by filling up with a word of one token.

    Raises:
        ValueError: the shortest is longer than wanted, or the filler's tokens do not come out even.
    """
    questions = [f"Hall {i % 7} holds {10 + i % 90} boxes and gets {11 + 7 * i % 80} more. How many are in it?" for i in range(count)]
    short = [_conversation(question, 0) for question in questions]
    missing = [prompt_tokens - have for have in count_tokens(short)]
    if min(missing) < 0:
        raise ValueError(f"prompts of {prompt_tokens} tokens are too short for the template; give at least {prompt_tokens - min(missing)}")
    a_filler = count_tokens([_conversation(questions[0], 1)])[0] - (prompt_tokens - missing[0])
    filled = [_conversation(q, number // a_filler) for q, number in zip(questions, missing, strict=True)]
    # What is left when a filler has several tokens (a byte-level tokenizer) is filled with dots, one token each.
    for conversation, have in zip(filled, count_tokens(filled), strict=True):
        conversation[-1]["content"] += "." * (prompt_tokens - have)
    if any(have != prompt_tokens for have in count_tokens(filled)):
        raise ValueError(f"could not fill prompts up to exactly {prompt_tokens} tokens with this tokenizer")
    return filled


def _conversation(question: str, num_fillers: int) -> list[dict[str, str]]:
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question + FILLER * num_fillers}]

"""The reference pages of docs/, made from the contracts: `python -m cli.reference` writes them, a test holds them to the code."""

from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from core.contracts import (
    AlgorithmSettings,
    CurriculumSettings,
    DpoHyperparameters,
    EvaluationSettings,
    Hyperparameters,
    LearningRateGroup,
    LoraSettings,
    MultiGrader,
    OptimizerSettings,
    RankBudget,
    RolloutSettings,
    StringCheckGrader,
    SupervisedHyperparameters,
    TextSimilarityGrader,
    WarmUpSettings,
)
from core.contracts.job import JobSpec
from core.settings import Settings

DOCS = Path(__file__).parent.parent / "docs"
_JOB_SECTIONS: tuple[tuple[str, str, type[BaseModel]], ...] = (
    ("method.reinforcement.hyperparameters", "OpenAI's own fields.", Hyperparameters),
    ("method.supervised.hyperparameters", "OpenAI's own fields, and this platform's two of evaluation.", SupervisedHyperparameters),
    ("method.dpo.hyperparameters", "OpenAI's own fields, and this platform's two of evaluation.", DpoHyperparameters),
    ("lora", "Beside OpenAI's fields; with the `openai` client in `extra_body`.", LoraSettings),
    ("algorithm", "Beside OpenAI's fields; with the `openai` client in `extra_body`.", AlgorithmSettings),
    ("rollout", "Beside OpenAI's fields; with the `openai` client in `extra_body`.", RolloutSettings),
    ("optimizer", "Beside OpenAI's fields; with the `openai` client in `extra_body`.", OptimizerSettings),
    ("optimizer.learning_rate_groups[]", "", LearningRateGroup),
    ("lora.rank_budget", "", RankBudget),
    ("warm_up", "Beside OpenAI's fields; with the `openai` client in `extra_body`.", WarmUpSettings),
    ("curriculum", "Beside OpenAI's fields; with the `openai` client in `extra_body`.", CurriculumSettings),
    ("evaluation", "Beside OpenAI's fields; with the `openai` client in `extra_body`.", EvaluationSettings),
    ("grader of type string_check", "", StringCheckGrader),
    ("grader of type text_similarity", "", TextSimilarityGrader),
    ("grader of type multi", "", MultiGrader),
)


def job_page() -> str:
    """docs/job-settings.md: every field that a job may set."""
    parts = [
        "# What a job may set",
        "Made by `python -m cli.reference` from `core/contracts`; do not edit. An unknown field is refused by name.",
    ]
    for title, note, model in _JOB_SECTIONS:
        parts.append(f"## `{title}`")
        if note:
            parts.append(note)
        parts.append(_table({name: field for name, field in model.model_fields.items() if name != "type"}))
    names = ("checkpoint_interval", "num_steps", "start_from", "start_mode", "start_learning_rate")
    own = {name: JobSpec.model_fields[name] for name in names}
    parts += ["## Of the job itself", "Beside OpenAI's fields; with the `openai` client in `extra_body`.", _table(own)]
    return "\n\n".join(parts) + "\n"


def settings_page() -> str:
    """docs/settings.md: every environment variable."""
    made = "Made by `python -m cli.reference` from `core/settings.py`; do not edit. Read once from the environment."
    return f"# Settings of the platform\n\n{made}\n\n{_table(Settings.model_fields, prefix='ESPALIER_')}\n"


def _table(fields: dict[str, FieldInfo], prefix: str = "") -> str:
    rows = ["| field | default | meaning |", "|---|---|---|"]
    for name, field in fields.items():
        shown = f"{prefix}{name.upper()}" if prefix else name
        limits = _limits(field)
        rows.append(f"| `{shown}` | {_default(field)} | {field.description or ''}{f' ({limits})' if limits else ''} |")
    return "\n".join(rows)


def _default(field: FieldInfo) -> str:
    value: Any = field.get_default(call_default_factory=True, validated_data={})
    if value is PydanticUndefined:
        return "required"
    if value is None:
        return "–"
    if isinstance(value, (tuple, list)):
        return ", ".join(f"`{item}`" for item in value) or "none"
    return f"`{value}`"


def _limits(field: FieldInfo) -> str:
    signs = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
    found = [
        f"{sign} {getattr(rule, key)}" for rule in field.metadata for key, sign in signs.items() if getattr(rule, key, None) is not None
    ]
    return ", ".join(found)


if __name__ == "__main__":
    (DOCS / "job-settings.md").write_text(job_page())
    (DOCS / "settings.md").write_text(settings_page())

"""Contracts refuse what can't be carried out and compute what follows from them."""

import pytest
from pydantic import ValidationError

from core.contracts import AlgorithmSettings, JobSpec, LoraSettings, OptimizerSettings

GRADER = {"type": "string_check", "name": "g", "input": "{{sample.output_text}}", "reference": "x", "operation": "eq"}


def _spec(**changes: object) -> JobSpec:
    reinforcement = {"grader": GRADER, "hyperparameters": changes.pop("hyperparameters", {})}
    return JobSpec.model_validate(
        {"base_model": "b", "training_file_sha256": "0" * 64, "seed": 1, "reinforcement": reinforcement, **changes}
    )


def test_unknown_fields_are_refused() -> None:
    with pytest.raises(ValidationError, match="lora_r"):
        LoraSettings.model_validate({"lora_r": 8})


def test_contracts_are_frozen() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        LoraSettings().rank = 3  # pyright: ignore[reportAttributeAccessIssue]


def test_a_second_copy_of_the_base_is_refused_with_the_reason() -> None:
    with pytest.raises(ValidationError, match="share_backbone must be true"):
        AlgorithmSettings.model_validate({"share_backbone": False})


def test_duplicate_target_modules_are_refused() -> None:
    with pytest.raises(ValidationError, match="twice"):
        LoraSettings.model_validate({"target_modules": ["q_proj", "q_proj"]})


def test_nan_is_no_learning_rate() -> None:
    with pytest.raises(ValidationError):
        OptimizerSettings.model_validate({"learning_rate": float("nan")})


def test_multipliers_apply_to_our_own_settings() -> None:
    spec = _spec(hyperparameters={"learning_rate_multiplier": 2.0, "compute_multiplier": 0.5})
    assert spec.learning_rate == pytest.approx(2e-4)
    assert spec.group_size == 4


@pytest.mark.parametrize(("rows", "epochs", "batch", "want"), [(64, 1, 8, 8), (65, 1, 8, 9), (3, 2, 8, 2), (10, 3, 4, 8)])
def test_steps_cover_every_epoch(rows: int, epochs: int, batch: int, want: int) -> None:
    spec = _spec(hyperparameters={"n_epochs": epochs, "batch_size": batch})
    assert spec.total_steps(rows) == want


def test_scaling_is_alpha_over_rank() -> None:
    assert LoraSettings(rank=8, alpha=32).scaling_of("layers.0.mlp.up_proj") == 4


def test_reasoning_effort_is_refused_with_the_reason() -> None:
    with pytest.raises(ValidationError, match="not a setting of this platform"):
        _spec(hyperparameters={"reasoning_effort": "high"})

"""An algorithm's name brings its paper's defaults; what it has no use for is refused with the reason."""

import pytest
from pydantic import ValidationError

from core.contracts import AlgorithmSettings


@pytest.mark.parametrize(
    ("name", "defaults"),
    [
        ("grpo", {"clip_low": 0.2, "clip_high": 0.2, "beta": 0.04, "scale_advantages": True, "loss_aggregation": "sequence"}),
        ("dr_grpo", {"scale_advantages": False, "loss_aggregation": "constant", "beta": 0}),
        ("dapo", {"clip_low": 0.2, "clip_high": 0.28, "loss_aggregation": "token", "beta": 0, "dynamic_sampling": True}),
        ("gspo", {"clip_low": 3e-4, "clip_high": 4e-4, "loss_aggregation": "sequence", "beta": 0}),
        ("cispo", {"clip_low": 1, "clip_high": 4, "loss_aggregation": "token", "beta": 0}),
        ("rloo", {"scale_advantages": False, "loss_aggregation": "sum", "beta": 0.05, "kl_in": "reward"}),
        ("flowrl", {"reward_scale": 15, "scale_advantages": True, "beta": 0, "share_backbone": True}),
        ("sft", {"loss_aggregation": "token", "beta": 0, "share_backbone": False}),
        ("dpo", {"beta": 0.1, "group_size": 2, "share_backbone": True}),
    ],
)
def test_defaults_are_the_papers(name: str, defaults: dict[str, object]) -> None:
    settings = AlgorithmSettings.model_validate({"name": name})
    assert {field: getattr(settings, field) for field in defaults} == defaults
    assert AlgorithmSettings.model_validate({"name": name, "clip_high": 0.5}).clip_high == 0.5


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"name": "flowrl", "beta": 0.1}, "holds the reference"),
        ({"name": "sft", "beta": 0.1}, "samples nothing"),
        ({"name": "sft", "importance_cap": 2}, "samples nothing"),
        ({"name": "dpo", "importance_cap": 2}, "samples nothing"),
        ({"name": "dpo", "beta": 0}, "temperature"),
        ({"name": "dpo", "entropy_bonus": 0.1}, "entropy"),
        ({"importance_mode": "reject"}, "importance_cap"),
        ({"clip_low": 1.5}, "less than or equal to 1"),
    ],
)
def test_what_has_no_use_is_refused(settings: dict[str, object], reason: str) -> None:
    with pytest.raises(ValidationError, match=reason):
        AlgorithmSettings.model_validate(settings)

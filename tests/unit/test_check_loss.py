"""What a loss can't be computed from is refused before anything is: a mixed batch of several tenants must not fail for one of them."""

from dataclasses import replace

import numpy as np
import pytest

from core.errors import InvalidInput
from engine.losses import check_loss
from engine.types import LossSettings, TrainGroup

ONES = np.ones(2, np.float32)
PAIR = TrainGroup(np.array([3], np.int32), (np.array([4, 5], np.int32), np.array([6], np.int32)), ONES, ONES)
SINGLE = replace(PAIR, completions=PAIR.completions[:1], advantages=ONES[:1], weights=ONES[:1])
EMPTY = replace(PAIR, completions=(PAIR.completions[0], np.zeros(0, np.int32)))
SAMPLED = replace(PAIR, sampler_logprobs=(np.zeros(2, np.float32), np.zeros(1, np.float32)))
LOSS = LossSettings(clip_low=0.2, clip_high=0.2, beta=0.0, denominator=2.0, temperature=1.0)


@pytest.mark.parametrize(
    ("loss", "groups", "reason"),
    [
        (replace(LOSS, denominator=0.0), [PAIR], "above 0"),
        (replace(LOSS, denominator=float("nan")), [PAIR], "above 0"),
        (replace(LOSS, denominator=float("inf")), [PAIR], "above 0"),
        (replace(LOSS, beta=-0.1), [PAIR], "not below 0"),
        (replace(LOSS, entropy_bonus=float("nan")), [PAIR], "not below 0"),
        (replace(LOSS, kind="flow", beta=0.1), [PAIR], "no KL term"),
        (replace(LOSS, kind="sft", beta=0.1), [PAIR], "no KL term"),
        (replace(LOSS, kind="dpo"), [PAIR], "temperature"),
        (replace(LOSS, kind="dpo", beta=0.1, entropy_bonus=0.1), [PAIR], "no entropy bonus"),
        (replace(LOSS, kind="dpo", beta=0.1), [PAIR, SINGLE], "two completions"),
        (replace(LOSS, kind="dpo", beta=0.1), [EMPTY], "two completions"),
        (replace(LOSS, kind="sft", importance_cap=2.0), [SAMPLED], "samples nothing"),
        (replace(LOSS, importance_cap=0.0), [SAMPLED], "above 0"),
        (replace(LOSS, importance_cap=2.0), [SAMPLED, PAIR], "every group"),
    ],
)
def test_refused(loss: LossSettings, groups: list[TrainGroup], reason: str) -> None:
    with pytest.raises(InvalidInput, match=reason):
        check_loss(groups, loss)


@pytest.mark.parametrize(
    ("loss", "groups"),
    [
        (LOSS, [PAIR, SINGLE, EMPTY]),
        (LOSS, []),
        (replace(LOSS, kind="dpo", beta=0.1), [PAIR]),
        (replace(LOSS, kind="flow", entropy_bonus=0.1), [PAIR]),
        (replace(LOSS, kind="sequence_clip", beta=0.1, importance_cap=2.0), [SAMPLED]),
    ],
)
def test_allowed(loss: LossSettings, groups: list[TrainGroup]) -> None:
    check_loss(groups, loss)

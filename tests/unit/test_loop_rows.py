"""Rows of a step, seeds, learning rates: pure functions of a job's settings."""

import numpy as np
import pytest

from engine.loop.rows import rows_of_step, sample_seed
from engine.loop.schedule import learning_rate_at, num_updates, optimizer_of
from tests.loops import make_spec


def test_every_row_is_seen_once_an_epoch_and_the_order_changes() -> None:
    rows = [row for step in range(35) for row in rows_of_step(3, 10, 4, step)]
    epochs = [rows[i : i + 10] for i in range(0, 140, 10)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == len(epochs)


def test_data_order_follows_from_seed_and_step_alone() -> None:
    assert rows_of_step(3, 10, 4, 17) == rows_of_step(3, 10, 4, 17)
    assert rows_of_step(3, 10, 4, 17) != rows_of_step(4, 10, 4, 17)
    # Written down: a change of this order would change every resumed job.
    assert rows_of_step(0, 8, 3, 2) == [5, 1, 2]


def test_sample_seeds_differ_and_fit() -> None:
    seeds = [sample_seed(1, step, row, k) for step in range(10) for row in range(10) for k in range(10)]
    assert len(set(seeds)) > 998
    assert all(0 <= seed < 2**31 for seed in seeds)
    assert sample_seed(1, 2, 3, 4) == 94295595


def rates(num_steps: int, **optimizer: object) -> list[float]:
    spec = make_spec(optimizer={"learning_rate": 1.0, **optimizer}, hyperparameters={"learning_rate_multiplier": 0.5})
    return [learning_rate_at(step, spec, num_steps) for step in range(num_steps)]


def test_learning_rate_schedules() -> None:
    assert rates(3) == [0.5] * 3
    assert rates(4, warmup_steps=2) == [0.25, 0.5, 0.5, 0.5]
    assert rates(4, schedule="linear") == pytest.approx([0.5, 0.375, 0.25, 0.125])
    assert rates(4, schedule="linear", warmup_steps=2) == pytest.approx([0.25, 0.5, 0.5, 0.25])
    assert rates(4, schedule="cosine") == pytest.approx([0.5 * 0.5 * (1 + np.cos(np.pi * s / 4)) for s in range(4)])
    assert rates(2, warmup_steps=9) == pytest.approx([0.5 / 9, 1 / 9])


def test_an_adapter_underneath_has_its_own_rate_before_all_other_groups() -> None:
    group = {"learning_rate": 1e-3, "target_modules": ["q_proj"]}
    stacked = {"start_mode": "stack", "start_from": "0" * 64, "start_lora": {"rank": 4}, "optimizer": {"learning_rate_groups": [group]}}
    groups = optimizer_of(make_spec(**stacked, start_learning_rate=1e-5)).learning_rate_groups
    assert [(g.part, g.learning_rate) for g in groups] == [("start", 1e-5), ("any", 1e-3)]
    assert len(optimizer_of(make_spec(**stacked)).learning_rate_groups) == 1, "a frozen one needs no group"


def test_updates_of_a_whole_job() -> None:
    spec = make_spec(warm_up={"steps": 3}, algorithm={"updates_per_rollout": 4}, num_steps=5)
    assert spec.total_steps(100) == 8
    assert num_updates(spec, 8) == 3 + 5 * 4

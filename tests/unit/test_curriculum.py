"""Which rows a step takes, by epochs, by difficulty and by what earlier steps earned.

1. Without a curriculum: epochs; replacements are other rows, the same at every try.
2. Equal weights: every row once an epoch. A row of weight w comes w times as often.
3. Difficulty: the easiest rows are open first, all after ramp; at least a step's worth always.
4. pass_rate: too easy and hopeless rows are met less; newer rewards count more; a row without a score keeps its weight.
5. A curriculum that goes on from its memory takes the rows of an unbroken one.
"""

from collections import Counter
from collections.abc import Callable
from itertools import islice

import pytest

from engine import wire
from engine.loop.curriculum import Curriculum, RowMemory
from engine.loop.rows import rows_of_step
from tests.loops import make_rows, make_spec


def curriculum(
    num_rows: int = 10, *, batch_size: int = 2, num_steps: int = 20, memory: list[RowMemory] | None = None, **settings: object
) -> Curriculum:
    spec = make_spec(curriculum=settings, hyperparameters={"batch_size": batch_size})
    return Curriculum(spec, make_rows(num_rows), num_steps, memory or [])


def walk(made: Curriculum, steps: range, *, size: int = 2, reward: Callable[[int], float | None] = lambda row: 0.5) -> list[int]:
    """The rows of these steps, each told of with its reward."""
    taken: list[int] = []
    for step in steps:
        rows = list(islice(made.rows_of(step), size))
        for row in rows:
            made.observe(row, reward(row))
        taken += rows
    return taken


def test_without_a_curriculum_rows_come_by_epochs_and_others_replace_them() -> None:
    made = curriculum(batch_size=3)
    for step in range(8):
        own = rows_of_step(0, 10, 3, step)
        assert list(islice(made.rows_of(step), 3)) == own
        whole = list(islice(made.rows_of(step), 25))
        assert whole == list(islice(made.rows_of(step), 25))
        assert set(whole[3 : 3 + 10 - len(set(own))]) == set(range(10)) - set(own), "others first"
    walk(made, range(3))
    assert made.memory() == [], "nothing to remember"


def test_equal_weights_are_epochs_in_changing_order() -> None:
    taken = walk(curriculum(mode="pass_rate"), range(20))
    epochs = [taken[i : i + 10] for i in range(0, 40, 10)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4


def test_too_easy_and_hopeless_rows_are_met_less() -> None:
    rewards = {0: 1.0, 1: 0.0, 2: 0.95, 3: 0.05}
    made = curriculum(mode="pass_rate", min_weight=0.25, batch_size=3)
    met = Counter(walk(made, range(200), size=3, reward=lambda row: rewards.get(row, 0.5)))
    ordinary = [met[row] for row in range(4, 10)]
    assert max(ordinary) - min(ordinary) <= 1
    for row in rewards:
        assert met[row] == pytest.approx(0.25 * ordinary[0], abs=1.5)


def test_a_row_that_is_no_longer_hopeless_comes_back() -> None:
    made = curriculum(mode="pass_rate", min_weight=0.1)
    made.observe(0, 0.0)
    assert made.weight(0) == 0.1
    made.observe(0, None)
    assert made.weight(0) == 0.1, "no score says nothing"
    made.observe(0, 0.4)
    assert made.weight(0) == 1.0, "half of 0.4 is over hopeless_below"
    made.observe(1, None)
    assert made.weight(1) == 1.0


def test_difficulty_opens_rows_from_easy_to_hard() -> None:
    made = curriculum(mode="difficulty", num_steps=20, ramp=0.5)
    assert [made.num_open(step) for step in range(12)] == [2, 2, 3, 4, 5, 6, 7, 8, 9, 10, 10, 10]
    for step in range(12):
        # Row 9 is the easiest one of `make_rows`.
        rows = list(islice(made.rows_of(step), 2))
        assert min(rows) >= 10 - made.num_open(step)
        for row in rows:
            made.observe(row, 0.5)
    assert set(islice(made.rows_of(15), 10)) == set(range(10))


@pytest.mark.parametrize("settings", [{"mode": "pass_rate"}, {"mode": "difficulty", "ramp": 0.8}])
def test_going_on_from_memory_equals_an_unbroken_run(settings: dict[str, object]) -> None:
    def reward(row: int) -> float | None:
        return [0.0, 1.0, 0.5, None, 1 / 3][row % 5]

    whole = walk(curriculum(**settings), range(20), reward=reward)
    for broken_at in (1, 7, 13):
        first = curriculum(**settings)
        taken = walk(first, range(broken_at), reward=reward)
        stored = wire.unpack(wire.pack(list(first.memory())))
        second = curriculum(memory=[wire.build(RowMemory, known) for known in stored], **settings)
        assert taken + walk(second, range(broken_at, 20), reward=reward) == whole

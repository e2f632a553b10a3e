"""Standing of a job by its held-out scores, and when evaluations are due."""

from engine.loop.evaluation import Standing, is_due, score_of, standing
from tests.loops import make_spec


def test_best_step_is_the_first_of_the_best() -> None:
    scores = [(0, 0.1), (5, 0.4), (10, 0.4), (15, 0.3)]
    assert standing(scores, min_improvement=0.0) == Standing(5, 0.4, 2)
    assert standing(scores[:1], min_improvement=0.0) == Standing(0, 0.1, 0)
    assert standing([], min_improvement=0.0) is None


def test_small_gains_do_not_count_and_do_not_move_the_bar() -> None:
    scores = [(0, 0.1), (5, 0.14), (10, 0.18), (15, 0.26)]
    assert standing(scores[:3], min_improvement=0.1) == Standing(0, 0.1, 2)
    assert standing(scores, min_improvement=0.1) == Standing(15, 0.26, 0)


def test_a_loss_is_better_when_lower() -> None:
    assert score_of({"eval_loss": 0.5}) == -0.5
    assert score_of({"eval_reward_mean": 0.5, "loss": 3.0}) == 0.5
    assert score_of({"loss": 1.0}) is None


def test_evaluations_are_due_before_the_first_step_by_interval_and_at_the_end() -> None:
    spec = make_spec(hyperparameters={"eval_interval": 3})
    assert [step for step in range(8) if is_due(spec, step, 7)] == [0, 3, 6, 7]

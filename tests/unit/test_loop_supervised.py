"""sft and dpo as whole jobs over the scripted engine: batches, denominators, schedules, held-out losses."""

from typing import Any

import numpy as np
import pytest

from engine.loop.rows import rows_of_step
from tests.loops import Recorder, make_rows, make_spec, start


@pytest.mark.parametrize(
    ("aggregation", "weight", "denominator"), [("token", 1.0, 3 * 4), ("sequence", 0.25, 3), ("constant", 1.0, 3 * 20)]
)
def test_sft_learns_the_answers_of_its_rows(aggregation: str, weight: float, denominator: float) -> None:
    optimizer = {"learning_rate": 1e-2, "schedule": "linear"}
    spec = make_spec(
        algorithm={"name": "sft", "loss_aggregation": aggregation}, hyperparameters={"batch_size": 3, "n_epochs": 2}, optimizer=optimizer
    )
    verbs, rows = Recorder(), make_rows(6)
    assert spec.total_steps(6) == 4
    loop = start(spec, rows, 4, verbs)
    results = [loop.run_step(step) for step in range(4)]
    assert not {"sample", "sync", "forward"} & set(verbs.verbs)
    for step, (groups, loss) in enumerate(verbs.trained):
        expected = [rows[index].messages[0]["content"].encode() for index in rows_of_step(spec.seed, 6, 3, step)]
        assert [bytes(group.prompt_tokens.astype(np.uint8)) for group in groups] == expected
        assert all(group.completions[0].tolist() == [*b"yes", 0] for group in groups)
        assert all(group.weights.tolist() == [weight] for group in groups)
        assert (loss.kind, loss.denominator) == ("sft", denominator)
    assert [rate for rate, _ in verbs.rates] == pytest.approx([1e-2, 7.5e-3, 5e-3, 2.5e-3])
    assert results[-1].metrics["num_tokens"] == 12


def test_dpo_learns_from_pairs() -> None:
    spec, verbs = make_spec(algorithm={"name": "dpo", "beta": 0.3}), Recorder()
    start(spec, make_rows(4, answers=("better", "no")), 2, verbs).run_step(0)
    [(groups, loss)] = verbs.trained
    assert [[t.tolist() for t in group.completions] for group in groups] == [[[*b"better", 0], [*b"no", 0]]] * 2
    assert (loss.kind, loss.beta, loss.denominator) == ("dpo", 0.3, 2), "the denominator counts pairs"


class Known(Recorder):
    """Logprobs that a test can compute with."""

    def forward(self, adapter_id: str | None, groups: Any, *, temperature: float, reference: bool = False, exported: bool = False) -> Any:
        super().forward(adapter_id, groups, temperature=temperature, reference=reference, exported=exported)
        return tuple(tuple(np.full(len(t), -1.0 if reference else -len(t) / 10, np.float32) for t in g.completions) for g in groups)


def test_held_out_losses_are_those_of_the_papers() -> None:
    sft, dpo = make_spec(algorithm={"name": "sft"}), make_spec(algorithm={"name": "dpo", "beta": 0.5})
    held_out = [*make_rows(2), *make_rows(1, answers=("no",))]
    loop = start(sft, make_rows(2), 5, Known(), held_out=held_out)
    # Two answers of 4 tokens at -0.4 nats, one of 3 at -0.3.
    assert loop.evaluate() == {"eval_loss": pytest.approx((8 * 0.4 + 3 * 0.3) / 11)}
    assert [step for step in range(6) if loop.wants_eval(step)] == [0, 5]
    pairs = [*make_rows(1, answers=("better", "no")), *make_rows(1, answers=("no", "better"))]
    loop = start(dpo, make_rows(2, answers=("better", "no")), 5, Known(), held_out=pairs)
    # 7 tokens at -0.7 against -1: a log-ratio of 2.1; 3 tokens at -0.3: 2.1 as well, so the margins are 0 up to rounding.
    found = loop.evaluate()
    assert found["eval_loss"] == pytest.approx(np.log(2), abs=1e-6)
    longer = start(dpo, make_rows(1), 5, Known(), held_out=make_rows(1, answers=("yes", "no"))).evaluate()
    margin = 0.5 * (4 * 0.6 - 3 * 0.7)
    assert longer == {"eval_loss": pytest.approx(np.log1p(np.exp(-margin))), "eval_accuracy": 1.0}


def test_a_loop_without_held_out_rows_is_never_evaluated() -> None:
    assert not start(make_spec(algorithm={"name": "sft"}), make_rows(2), 5, Recorder()).wants_eval(0)

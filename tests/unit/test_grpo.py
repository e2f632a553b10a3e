"""The loop by rewards, step by step, over the scripted engine.

1. Advantages equal the formula; excluded rewards do not touch the others; dead groups are exactly zero.
2. A step that teaches nothing leaves the adapter alone; rows that come twice are sampled with other seeds.
3. Several updates a rollout: old logprobs are those of the first forward_backward, no pass of their own.
4. TIS sends the sampler's logprobs; reject takes one pass and reports its share.
5. Dynamic sampling replaces dead groups by other rows, within its rounds, and says what it cost.
6. Warm-up steps come first and end in a new phase.
7. A loop that goes on at any step does what an unbroken one does, for each algorithm.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from engine.advantages import EPS, group_advantages, is_dead
from engine.loop.rows import rows_of_step
from tests.loops import Recorder, make_rows, make_spec, start
from tests.scripted_engine import ScriptedEngine

NEVER = {"type": "string_check", "name": "g", "input": "{{sample.output_text}}", "reference": "x", "operation": "eq"}


@pytest.mark.parametrize("scale", [True, False])
def test_advantages_equal_a_float64_reference(scale: bool) -> None:
    rng = np.random.default_rng(0)
    for size in (2, 3, 8, 64):
        rewards = rng.random(size)
        centred = rewards - rewards.sum() / size
        std = np.sqrt((centred**2).sum() / (size - 1))
        expected = centred / (std + EPS) if scale else centred
        np.testing.assert_allclose(group_advantages(list(rewards), scale=scale), expected, rtol=1e-6, atol=1e-7)


def test_excluded_rewards_do_not_touch_the_others() -> None:
    with_none = group_advantages([1.0, None, 0.0, 0.25, None], scale=True)
    np.testing.assert_array_equal(with_none[[0, 2, 3]], group_advantages([1.0, 0.0, 0.25], scale=True))
    assert np.isnan(with_none[[1, 4]]).all()


@pytest.mark.parametrize("rewards", [[0.1] * 3, [0.7] * 10, [None, 0.3], [0.3], [None, None], [0.0, 0.0]])
def test_dead_groups_are_exactly_zero(rewards: list[float | None]) -> None:
    advantages = group_advantages(rewards, scale=True)
    assert is_dead(advantages)
    assert not np.nan_to_num(advantages).any()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_rewards_that_are_not_finite_are_refused(bad: float) -> None:
    with pytest.raises(ValueError, match="finite"):
        group_advantages([bad, 1.0], scale=True)


def test_row_that_comes_twice_in_a_step_is_sampled_with_other_seeds() -> None:
    spec, verbs = make_spec(), Recorder()
    step = next(s for s in range(50) if len(set(rows_of_step(spec.seed, 3, 2, s))) == 1)
    start(spec, make_rows(3), 50, verbs).run_step(step)
    [[first, second]] = verbs.asked
    np.testing.assert_array_equal(first.prompt_tokens, second.prompt_tokens)
    assert len({p.seed for p in first.params + second.params}) == 2 * spec.group_size


def test_step_without_a_live_group_counts_and_leaves_the_adapter_alone() -> None:
    spec, verbs = make_spec(grader=NEVER), Recorder()
    loop = start(spec, make_rows(1), 5, verbs)
    before = verbs.engine.adapters["a"].fingerprint
    result = loop.run_step(0)  # no completion equals "x", so every reward is 0
    assert (result.step, result.fingerprint) == (1, before)
    assert (result.metrics["dead_group_share"], result.metrics["num_tokens"], result.metrics["loss"]) == (1.0, 0.0, 0.0)
    assert not {"forward_backward", "optim_step"} & set(verbs.verbs)


def test_several_updates_share_the_old_logprobs_of_the_first() -> None:
    spec, verbs = make_spec(algorithm={"updates_per_rollout": 3}), Recorder()
    result = start(spec, make_rows(4), 5, verbs).run_step(0)
    assert verbs.verbs.count("sample") == 1
    assert "forward" not in verbs.verbs
    assert result.step == 1
    [(first, loss), *others] = verbs.trained
    assert len(others) == 2
    assert all(group.old_logprobs is None and group.sampler_logprobs is None for group in first)
    for groups, other_loss in others:
        assert other_loss == loss
        for group, original in zip(groups, first, strict=True):
            assert group.old_logprobs is not None
            assert [t.tolist() for t in group.completions] == [t.tolist() for t in original.completions]
            assert [len(values) for values in group.old_logprobs] == [len(tokens) for tokens in group.completions]
    assert verbs.rates == [(1e-2, 15)] * 3, "one learning rate a step; the rank budget knows of all updates"
    assert result.metrics["num_tokens"] == 3 * sum(len(t) for group in first for t in group.completions)


@pytest.mark.parametrize("mode", ["truncate", "reject"])
def test_importance_sampling_against_the_rollout_engine(mode: str) -> None:
    spec, verbs = make_spec(algorithm={"importance_cap": 2.0, "importance_mode": mode}), Recorder()
    result = start(spec, make_rows(4), 5, verbs).run_step(0)
    [(groups, loss)] = verbs.trained
    assert loss.importance_cap == 2.0
    assert all(group.sampler_logprobs is not None for group in groups)
    assert (verbs.verbs.count("forward"), result.metrics.get("rejected_share")) == ((1, 0.0) if mode == "reject" else (0, None))


class Shifted(Recorder):
    """A trainer that disagrees with the sampler about every completion's first token."""

    def forward(self, *args: Any, **options: Any) -> Any:
        groups = super().forward(*args, **options)
        return tuple(tuple(values + 5 * (np.arange(len(values)) == 0) for values in group) for group in groups)


def test_tokens_that_trainer_and_sampler_disagree_about_are_rejected() -> None:
    spec = make_spec(algorithm={"importance_cap": 2.0, "importance_mode": "reject", "loss_aggregation": "token"})
    verbs = Shifted()
    result = start(spec, make_rows(4), 5, verbs).run_step(0)
    [(groups, loss)] = verbs.trained
    masks = [mask for group in groups for mask in group.token_weights or ()]
    assert all(mask[0] == 0 and mask[1:].all() for mask in masks)
    assert result.metrics["rejected_share"] == len(masks) / sum(len(mask) for mask in masks)
    in_dead = 0 if len(groups) == 2 else sum(len(t) for t in dead_completions(verbs, groups))
    assert loss.denominator == sum(mask.sum() for mask in masks) + in_dead


def dead_completions(verbs: Recorder, live: Sequence[Any]) -> list[Any]:
    """Completions of the step's groups that are not trained on."""
    prompts = {group.prompt_tokens.tobytes() for group in live}
    dead = [request for request in verbs.asked[-1] if request.prompt_tokens.tobytes() not in prompts]
    return [done.tokens for group in verbs.sample("a", dead) for done in group]


def dynamic(max_rounds: int, grader: Any) -> Any:
    algorithm = {"name": "dapo", "max_sampling_rounds": max_rounds, "group_size": 2, "overlong_buffer_share": 0}
    return make_spec(algorithm=algorithm, grader=grader, hyperparameters={"batch_size": 4})


def test_dynamic_sampling_replaces_dead_groups_by_other_rows() -> None:
    exact = {"type": "string_check", "name": "g", "input": "{{sample.output_text}}", "reference": "yes", "operation": "eq"}
    once, often = Recorder(), Recorder()
    first = start(dynamic(1, exact), make_rows(30), 5, once).run_step(0).metrics
    assert (first["sampling_rounds"], first["replaced_groups"]) == (1, 0)
    num_live = len(once.trained[0][0])
    assert 0 < num_live < 4
    metrics = start(dynamic(6, exact), make_rows(30), 5, often).run_step(0).metrics
    assert len(often.trained[0][0]) == 4, "every place is taken by a group that teaches"
    assert metrics["sampling_rounds"] == len(often.asked) > 1
    assert metrics["replaced_groups"] == sum(len(asked) for asked in often.asked) - 4
    assert metrics["dead_group_share"] == metrics["replaced_groups"] / (metrics["replaced_groups"] + 4)
    prompts = [request.prompt_tokens.tobytes() for asked in often.asked for request in asked]
    assert len(set(prompts)) == len(prompts), "no row comes twice while there are others"
    assert [len(asked) for asked in often.asked][:2] == [4, 4 - num_live], "only what is missing is sampled again"


def test_dynamic_sampling_ends_after_its_rounds_and_keeps_what_it_has() -> None:
    verbs = Recorder()
    metrics = start(dynamic(3, NEVER), make_rows(5), 5, verbs).run_step(0).metrics
    assert [len(asked) for asked in verbs.asked] == [4, 4, 4]
    assert (metrics["replaced_groups"], metrics["dead_group_share"], metrics["num_tokens"]) == (8, 1.0, 0)
    seeds = [params.seed for asked in verbs.asked for request in asked for params in request.params]
    assert len(set(seeds)) == len(seeds), "rows that come again, since the file is small, are sampled anew"


def test_warm_up_comes_first_and_ends_in_a_new_phase() -> None:
    spec = make_spec(warm_up={"steps": 2, "batch_size": 3, "learning_rate": 5e-3}, num_steps=2)
    verbs = Recorder()
    loop = start(spec, make_rows(4), spec.total_steps(4), verbs)
    verbs.engine.calls.clear()
    results = [loop.run_step(step) for step in range(4)]
    assert [result.step for result in results] == [1, 2, 3, 4]
    supervised = ["render", "render_answers", "forward_backward", "optim_step"]
    assert verbs.verbs[:10] == [*supervised, "sync", *supervised, "new_phase"]
    assert verbs.verbs.count("new_phase") == 1
    assert [loss.kind for _, loss in verbs.trained] == ["sft", "sft", "clip", "clip"]
    assert [rate for rate, _ in verbs.rates] == [5e-3, 5e-3, 1e-2, 1e-2]
    groups, loss = verbs.trained[0]
    assert len(groups) == 3
    assert [t.tolist() for t in groups[0].completions] == [[*b"yes", 0]]
    assert (loss.denominator, loss.beta, loss.temperature) == (12, 0, 1)
    # The first step by rewards takes the rows that it would take without a warm-up.
    alone = Recorder()
    start(make_spec(num_steps=2), make_rows(4), 2, alone).run_step(0)
    prompts = [[r.prompt_tokens.tobytes() for r in asked[0]] for asked in (verbs.asked, alone.asked)]
    assert prompts[0] == prompts[1]


ALGORITHMS: list[dict[str, Any]] = [
    {"algorithm": {"name": name}} for name in ("grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo", "flowrl", "sft")
] + [
    {"algorithm": {"updates_per_rollout": 3}},
    {"algorithm": {"importance_cap": 2.0, "importance_mode": "reject"}},
    {"algorithm": {"kl_in": "reward", "mask_truncated": True}},
    {"algorithm": {"name": "dapo"}, "curriculum": {"mode": "pass_rate", "easy_above": 0.6, "hopeless_below": 0.4}},
    {"curriculum": {"mode": "difficulty"}, "warm_up": {"steps": 3}},
]


@pytest.mark.parametrize("changes", ALGORITHMS, ids=str)
def test_going_on_at_any_step_equals_an_unbroken_run(changes: dict[str, Any]) -> None:
    spec, rows = make_spec(**changes, num_steps=6), make_rows(9)
    num_steps = spec.total_steps(9)
    whole = Recorder()
    loop = start(spec, rows, num_steps, whole)
    fingerprints = [loop.run_step(step).fingerprint for step in range(num_steps)]
    assert len(set(fingerprints)) > 3
    for broken_at in (1, 4):
        first = Recorder()
        loop = start(spec, rows, num_steps, first)
        for step in range(broken_at):
            loop.run_step(step)
        second = Recorder(ScriptedEngine())
        second.load_state("a", first.save_state("a"))
        loop = start(spec, rows, num_steps, second, memory=loop.memory())
        assert [loop.run_step(step).fingerprint for step in range(broken_at, num_steps)] == fingerprints[broken_at:]

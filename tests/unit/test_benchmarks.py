"""The parts of the benchmarks that compute: spreads, needed arithmetic against a count by hand, workloads, wasteful batches."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from benchmarks.arithmetic import GroupLengths, ModelShape, decode_work, train_work
from benchmarks.batches import Sizes, make_groups, one_by_one, padded
from benchmarks.curves import Comparison, Curves, compare, same
from benchmarks.job import prompts_digest, rows_in_order
from benchmarks.machine import has_native_bf16
from benchmarks.measure import Spread, alternate, ratio
from benchmarks.options import endless
from benchmarks.parity_flow import target_distribution, train
from benchmarks.workload import Conversation, Workload, demo_workload, exact_conversations, fixed_workload

SHAPE = ModelShape(hidden=8, intermediate=16, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=4, vocab=32)


def words(conversations: Sequence[Conversation]) -> list[int]:
    """A tokenizer of one token a word, a dot a token of its own."""
    return [sum(len(m["content"].split()) + m["content"].count(".") for m in c) + 4 for c in conversations]


def test_spread_tells_median_and_range() -> None:
    assert Spread((3.0, 1.0, 2.0)).as_json() == {"median": 2.0, "low": 1.0, "high": 3.0, "repeats": 3}
    assert ratio(Spread((4.0, 6.0)), Spread((2.0,))) == 2.5
    with pytest.raises(ValueError, match="nothing"):
        Spread(())


def test_runs_alternate_and_the_warm_up_does_not_count() -> None:
    order: list[str] = []

    def run(name: str) -> float:
        order.append(name)
        return float(len(order))

    first, second = alternate([lambda: run("a"), lambda: run("b")], repeats=2)
    assert order == ["a", "b"] * 3
    assert (first.values, second.values) == ((3.0, 5.0), (4.0, 6.0))


def test_rows_pairs_and_targets_of_a_group() -> None:
    group = GroupLengths(3, (2, 1))
    # Rows: 3 of the prompt, 1 of the first completion. Pairs: 1+2+3 in the prompt, then that row sees 3 + itself.
    assert (group.rows, group.targets, group.pairs) == (4, 3, 6 + 4)


def test_training_work_is_what_a_count_by_hand_gives() -> None:
    layer = 8 * 8 + 2 * 8 * 4 + 8 * 8 + 3 * 8 * 16
    only_kv = 2 * 8 * 4
    work = train_work(SHAPE, [GroupLengths(3, (2, 1))], rank=0, with_reference=True)
    attention = 4 * 2 * 4 * 10 * 2
    head = 2 * 8 * 32 * 3
    # Layer 0 computes 4 rows; the last layer only keys and values for rows that predict nothing: rows 0 and 1 of the prompt.
    forward = 2 * layer * 4 + 2 * (only_kv * 4 + (layer - only_kv) * 2) + attention + head
    assert work.forward == work.reference == forward
    below = 2 * (8 * 8 + only_kv) * 4
    assert work.backward == forward - below + attention


def test_factors_cost_three_times_their_forward() -> None:
    groups = [GroupLengths(3, (4, 4))]
    bare, lora = (train_work(SHAPE, groups, rank=rank, with_reference=False) for rank in (0, 2))
    assert bare.reference == 0
    assert lora.backward - bare.backward == 2 * (lora.forward - bare.forward) > 0


def test_decoding_reads_weights_once_a_step() -> None:
    one = decode_work(SHAPE, [GroupLengths(3, (5,))], rank=0, bytes_per_weight=4)
    two = decode_work(SHAPE, [GroupLengths(3, (5, 5))], rank=0, bytes_per_weight=4)
    own = 2 * 1 * 4 * 2 * 4 * (5 * 4 // 2)
    assert two.bytes_read - one.bytes_read == own
    assert one.bytes_read > 5 * SHAPE.num_weights * 4
    assert two.operations < 2 * one.operations


def test_shape_is_read_from_a_config(tmp_path: Path) -> None:
    config = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3,
              "vocab_size": 49152}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert ModelShape.read(tmp_path).num_weights == 134479872  # SmolLM2-135M without its norms


@pytest.mark.parametrize("length", [40, 57, 64])
def test_prompts_have_exactly_the_length_asked_for(length: int) -> None:
    conversations = exact_conversations(20, length, words)
    assert words(conversations) == [length] * 20
    assert len({c[-1]["content"] for c in conversations}) == 20


def test_prompts_that_are_too_short_are_refused() -> None:
    with pytest.raises(ValueError, match="at least"):
        exact_conversations(2, 5, words)


def test_workload_crosses_to_the_peer_unchanged() -> None:
    fixed = fixed_workload(num_prompts=2, group_size=2, prompt_tokens=40, completion_tokens=8, num_steps=3, count_tokens=words)
    for workload in (fixed, demo_workload(seed=11, num_steps=2)):
        assert Workload.from_json(json.loads(json.dumps(workload.as_json()))) == workload


def test_peer_meets_the_rows_in_the_loops_order() -> None:
    order = rows_in_order(demo_workload(num_steps=12))
    assert sorted(order) == list(range(96))
    assert order != list(range(96))


def test_digest_of_prompts_ignores_order_and_repeats() -> None:
    assert prompts_digest([[1, 2], [3]]) == prompts_digest([np.array([3], np.int32), [1, 2], [1, 2]])
    assert prompts_digest([[1, 2], [3]]) != prompts_digest([[1, 2, 3]])


def test_endless_base_names_no_end_and_links_the_weights(tmp_path: Path) -> None:
    base = tmp_path / "base"
    base.mkdir()
    (base / "model.safetensors").write_bytes(b"weights")
    (base / "config.json").write_text('{"eos_token_id": 2, "vocab_size": 5}')
    (base / "tokenizer_config.json").write_text('{"eos_token": "<end>", "pad_token": "<end>"}')
    target = endless(base, tmp_path / "endless")
    assert (target / "model.safetensors").resolve() == (base / "model.safetensors").resolve()
    assert json.loads((target / "config.json").read_text()) == {"eos_token_id": None, "vocab_size": 5}
    assert json.loads((target / "tokenizer_config.json").read_text()) == {"eos_token": None, "pad_token": "<end>"}


def test_bf16_is_native_only_with_its_own_instructions() -> None:
    assert has_native_bf16("flags\t: avx512f avx512_bf16 fma\n")
    assert not has_native_bf16("flags\t: avx512f avx512bw avx2\n")


def test_wasteful_batches_ask_for_the_same_loss() -> None:
    groups = make_groups(Sizes(4, 4, 10, 12), vocab=100, mixed=True)
    lengths = sorted(len(c) for g in groups for c in g.completions)
    assert (lengths[0], lengths[-1]) == (1, 12)
    alone = one_by_one(groups)
    assert [len(g.completions) for g in alone] == [1] * 16
    assert sum(float(g.weights @ g.advantages) for g in alone) == pytest.approx(sum(float(g.weights @ g.advantages) for g in groups))
    for group, filled in zip(groups, padded(groups, 12), strict=True):
        assert filled.token_weights is not None
        assert [int(kept.sum()) for kept in filled.token_weights] == [len(c) for c in group.completions]
        assert {len(c) for c in filled.completions} == {12}


def test_curves_of_one_kind_are_the_same_and_others_are_not() -> None:
    ours = Curves("ours", ((0.2, 0.5, 0.9), (0.25, 0.55, 0.92), (0.22, 0.5, 0.88)))
    close = Curves("close", ((0.21, 0.52, 0.9), (0.24, 0.5, 0.9), (0.2, 0.54, 0.91)))
    flat = Curves("flat", ((0.2, 0.21, 0.2), (0.2, 0.2, 0.22), (0.21, 0.2, 0.2)))
    assert same(compare(ours, close))
    assert all(c.shown_equivalent for c in compare(ours, close).values())
    assert not same(compare(ours, flat))
    assert all(c.detected for c in compare(ours, flat).values())


def test_comparison_is_students_t_and_an_exact_permutation() -> None:
    comparison = Comparison((1.0, 2.0, 3.0), (3.0, 4.0, 5.0))
    # Pooled variance 1, so the standard error is sqrt(2 / 3); t = 2.449, below 2.776.
    assert comparison.difference == -2.0
    assert comparison.standard_error == pytest.approx((2 / 3) ** 0.5)
    assert not comparison.detected
    # Of 20 ways to deal out 1 2 3 3 4 5, four differ by 2: either 3 may change sides, both ways round.
    assert comparison.permutation_p == pytest.approx(4 / 20)


def test_wide_spread_hides_a_difference_but_is_no_proof_of_equivalence() -> None:
    loose = Comparison((0.3, 0.6, 0.9), (0.35, 0.65, 0.9))
    assert not loose.detected
    assert not loose.shown_equivalent


def test_roughness_is_the_largest_fall() -> None:
    assert Curves("a", ((0.1, 0.6, 0.4, 0.9), (0.1, 0.2, 0.3, 0.4))).roughness == pytest.approx(0.1)


def test_one_seed_is_refused() -> None:
    with pytest.raises(ValueError, match="seeds"):
        compare(Curves("a", ((0.1, 0.2),)), Curves("b", ((0.1, 0.2),)))


def test_flowrl_moves_a_table_to_the_target() -> None:
    target = target_distribution()
    assert target.sum() == pytest.approx(1)
    uniform = np.full(len(target), 1 / len(target))
    before = float(uniform @ np.log(uniform / target))
    matched = train("flowrl", target, num_steps=300, seed=0)
    assert matched.to_target < before / 10
    assert matched.num_peaks == 5

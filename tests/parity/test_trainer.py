"""The trainer against stock transformers and PEFT, and against itself cut otherwise.

1. Per-token logprobs of base and adapter equal transformers + PEFT's over the exported folder, and the adapter's differ from the base's
   (verl#5488, verl#6380).
2. LoRA gradients equal PEFT's autograd.
3. Nothing depends on micro-batches, on the order of groups or on the attention's blocks (trl#6024, ms-swift#10117).
4. On policy the ratio is 1 at any temperature (trl#4159, trl#4163).
5. The EOS that ends a completion counts (trl#4970, trl#6357); nothing to train on gives 0 (trl#6439).
6. The same on the real SmolLM2 (slow).
"""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from core.contracts import LoraSettings, OptimizerSettings
from core.errors import InvalidInput
from core.settings import Settings
from engine.attention import PackedAttention
from engine.base_model import ensure_base_model
from engine.packing import Span
from engine.types import LossSettings, TrainGroup
from tests.engines import Engine, make_engine
from tests.training import (
    EOS,
    busy_weights,
    drain,
    gradients,
    make_groups,
    outside_logprobs,
    peft_gradients,
    peft_model,
    trainer_of,
    worst_relative,
)

LORA = LoraSettings(rank=4, alpha=6)
ATTENTION_ONLY = LoraSettings(rank=8, alpha=8, target_modules=("q_proj", "v_proj"))
SHAPES = ((9, (5, 1, 12)), (4, (7, 7)), (30, (3, 20, 2, 8)))
LOSS = LossSettings(clip_low=0.2, clip_high=0.2, beta=0.1, denominator=9, temperature=1)


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> Engine:
    return make_engine(tiny_model)


def check_against_peft(
    engine: Engine, base: Path, folder: Path, lora: LoraSettings, groups: tuple[TrainGroup, ...], *, scale: float
) -> None:
    trainer = trainer_of(engine, micro_batch_tokens=256)
    trainer.create_adapter("job", lora, seed=0, weights=busy_weights(engine, lora, seed=1, scale=scale))
    model = peft_model(base, trainer.save("job"), folder)
    logprobs, bare = (drain(trainer.forward(adapter_id, groups, temperature=0.8)) for adapter_id in ("job", None))
    with torch.no_grad(), model.disable_adapter():
        expected_bare = [[values.numpy() for values in outside_logprobs(model, group, 0.8)] for group in groups]
    total = torch.zeros(())
    for group, got, got_bare, want_bare in zip(groups, logprobs, bare, expected_bare, strict=True):
        for i, want in enumerate(outside_logprobs(model, group, 0.8)):
            assert np.abs(got[i] - want.detach().numpy()).max(initial=0) < 1e-4
            assert np.abs(got_bare[i] - want_bare[i]).max(initial=0) < 1e-4
            assert np.abs(got[i] - got_bare[i]).max(initial=0) > 1e-2
            total = total - (want * float(group.advantages[i]) * float(group.weights[i])).sum()
    (total / 9).backward()
    drain(trainer.forward_backward("job", groups, replace(LOSS, beta=0, temperature=0.8)))
    assert worst_relative(gradients(trainer, "job"), peft_gradients(model)) < 1e-4


@pytest.mark.parametrize("lora", [LORA, ATTENTION_ONLY])
def test_logprobs_and_gradients_equal_peft(engine: Engine, tiny_model: Path, tmp_path: Path, lora: LoraSettings) -> None:
    check_against_peft(engine, tiny_model, tmp_path, lora, make_groups(SHAPES), scale=0.1)


@pytest.mark.slow
def test_smollm2_equals_peft(tmp_path: Path) -> None:
    base = ensure_base_model(Settings())
    groups = make_groups(((40, (24, 9)), (75, (16, 30, 1))), vocab_size=49152)
    check_against_peft(make_engine(base), base, tmp_path, LoraSettings(), groups, scale=0.01)


def test_micro_batches_and_order_change_nothing(engine: Engine) -> None:
    """Cuts: one group per micro-batch, groups cut by completions with their prompt repeated, everything at once, reversed."""
    groups = make_groups(SHAPES)
    whole = trainer_of(engine, micro_batch_tokens=4096)
    weights = busy_weights(engine, LORA, seed=1)
    whole.create_adapter("job", LORA, seed=0, weights=weights)
    expected = drain(whole.forward_backward("job", groups, LOSS))
    for limit, order in ((1, (0, 1, 2)), (35, (0, 1, 2)), (60, (2, 0, 1)), (4096, (2, 1, 0))):
        trainer = trainer_of(engine, micro_batch_tokens=limit)
        trainer.create_adapter("job", LORA, seed=0, weights=weights)
        result = drain(trainer.forward_backward("job", [groups[i] for i in order], LOSS))
        assert worst_relative(gradients(trainer, "job"), gradients(whole, "job")) < 1e-5
        assert result.loss == pytest.approx(expected.loss, abs=1e-6)
        assert result.metrics == pytest.approx(expected.metrics, abs=1e-5)
        for place, i in enumerate(order):
            for got, want in zip(result.logprobs[place], expected.logprobs[i], strict=True):
                assert np.abs(got - want).max() < 1e-5


def test_calls_accumulate(engine: Engine) -> None:
    groups = make_groups(SHAPES)
    once, thrice = trainer_of(engine), trainer_of(engine)
    for trainer in (once, thrice):
        trainer.create_adapter("job", LORA, seed=0, weights=busy_weights(engine, LORA, seed=1))
    drain(once.forward_backward("job", groups, LOSS))
    losses = [drain(thrice.forward_backward("job", [group], LOSS)).loss for group in groups]
    assert worst_relative(gradients(thrice, "job"), gradients(once, "job")) < 1e-5
    assert sum(losses) == pytest.approx(drain(once.forward_backward("job", groups, LOSS)).loss, abs=1e-6)


def test_attention_blocks_change_nothing() -> None:
    generator = torch.Generator().manual_seed(0)
    span, num_rows = Span(6, (3, 0, 5, 1, 9)), 24
    query, key, value = (torch.randn(num_rows, heads, 8, generator=generator) for heads in (4, 2, 2))
    outputs = [PackedAttention((span,), torch.device("cpu"), block_rows=rows).attend(0, query, key, value, 0.3) for rows in (1, 8, 9, 256)]
    visible = torch.zeros(num_rows, num_rows, dtype=torch.bool)
    visible[:6, :6] = torch.ones(6, 6, dtype=torch.bool).tril()
    start = 6
    for rows in span.completion_rows:
        visible[start : start + rows, :6] = True
        visible[start : start + rows, start : start + rows] = torch.ones(rows, rows, dtype=torch.bool).tril()
        start += rows
    scores = torch.einsum("cqd,sqd->qcs", query, key.repeat_interleave(2, 1)) * 0.3
    plain = torch.einsum("qcs,sqd->cqd", scores.masked_fill(~visible, float("-inf")).softmax(-1), value.repeat_interleave(2, 1))
    for output in outputs:
        assert torch.allclose(output, plain, atol=1e-6)


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
def test_ratio_is_one_on_policy(engine: Engine, temperature: float) -> None:
    trainer = trainer_of(engine)
    trainer.create_adapter("job", LORA, seed=0, weights=busy_weights(engine, LORA, seed=1))
    groups = make_groups(SHAPES)
    loss = replace(LOSS, temperature=temperature)
    assert drain(trainer.forward_backward("job", groups, loss)).metrics["ratio"] == 1.0
    sampled = drain(trainer.forward("job", groups, temperature=temperature))
    on_policy = [replace(group, old_logprobs=values) for group, values in zip(groups, sampled, strict=True)]
    metrics = drain(trainer.forward_backward("job", on_policy, loss)).metrics
    assert metrics["ratio"] == pytest.approx(1, abs=1e-5)
    assert metrics["clip_fraction"] == 0
    if temperature != 1:
        untempered = drain(trainer.forward("job", groups, temperature=1.0))
        wrong = [replace(group, old_logprobs=values) for group, values in zip(groups, untempered, strict=True)]
        assert drain(trainer.forward_backward("job", wrong, loss)).metrics["clip_fraction"] > 0.2


def test_the_eos_counts(engine: Engine) -> None:
    trainer = trainer_of(engine)
    prompt, body = np.array([5, 6, 7], dtype=np.int32), np.array([9, 10], dtype=np.int32)
    ends = np.append(body, EOS).astype(np.int32)
    one = np.ones(1, np.float32)
    results = {}
    for name, tokens in (("open", body), ("ended", ends)):
        trainer.create_adapter(name, LORA, seed=0)
        results[name] = drain(trainer.forward_backward(name, [TrainGroup(prompt, (tokens,), one, one)], replace(LOSS, beta=0)))
    assert (results["open"].num_tokens, results["ended"].num_tokens) == (2, 3)
    assert len(results["ended"].logprobs[0][0]) == 3
    assert worst_relative_to_zero_free(gradients(trainer, "ended"), gradients(trainer, "open")) > 0.05


def worst_relative_to_zero_free(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """As worst_relative, over the factors whose gradient isn't 0 (A's is 0 while B is)."""
    kept = {name for name, grad in expected.items() if float(grad.norm()) > 0}
    return worst_relative({name: got[name] for name in kept}, {name: expected[name] for name in kept})


def test_nothing_to_train_on_is_zero(engine: Engine) -> None:
    trainer = trainer_of(engine)
    trainer.create_adapter("job", LORA, seed=0, weights=busy_weights(engine, LORA, seed=1))
    (group,) = make_groups(((5, (4, 6)),))
    none = np.zeros(0, np.int32)
    empty = replace(group, completions=(none, none))
    masked = replace(group, weights=np.zeros(2, np.float32))
    for groups in ([], [empty], [masked], [empty, masked]):
        result = drain(trainer.forward_backward("job", groups, LOSS))
        assert result.loss == 0
        assert all(np.isfinite(value) for value in result.metrics.values())
        before = trainer.save("job").fingerprint
        step = trainer.optim_step("job", OptimizerSettings(), learning_rate=1e-2)
        assert (step.grad_norm, step.fingerprint) == (0.0, before)
    kept = drain(trainer.forward_backward("job", [group, empty], LOSS))
    assert kept.loss == pytest.approx(drain(trainer.forward_backward("job", [group], LOSS)).loss, abs=1e-7)
    assert [len(values) for values in kept.logprobs[1]] == [0, 0]


def test_bad_batches_are_refused(engine: Engine) -> None:
    trainer = trainer_of(engine)
    trainer.create_adapter("job", LORA, seed=0)
    (group,) = make_groups(((5, (4, 6)),))
    short = (np.zeros(4, np.float32), np.zeros(5, np.float32))
    bad: list[tuple[TrainGroup, str]] = [
        (replace(group, prompt_tokens=np.zeros(0, np.int32)), "empty"),
        (replace(group, prompt_tokens=np.array([259], np.int32)), "vocabulary"),
        (replace(group, completions=(np.array([-1], np.int32), group.completions[1])), "vocabulary"),
        (replace(group, completions=(np.full(600, 5, np.int32), group.completions[1])), "limit"),
        (replace(group, advantages=np.zeros(3, np.float32)), "advantages"),
        (replace(group, advantages=np.array([np.nan, 1], np.float32)), "finite"),
        (replace(group, old_logprobs=short), "old_logprobs"),
    ]
    for broken, word in bad:
        with pytest.raises(InvalidInput, match=word):
            drain(trainer.forward_backward("job", [group, broken], LOSS))
    for loss in (replace(LOSS, denominator=0), replace(LOSS, temperature=0)):
        with pytest.raises(InvalidInput):
            drain(trainer.forward_backward("job", [group], loss))
    assert all(float(grad.norm()) == 0 for grad in gradients(trainer, "job").values())

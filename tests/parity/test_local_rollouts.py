"""The local engine against transformers, PEFT and the trainer, on the tiny base in float32.

1. Greedy tokens equal transformers.generate, base and LoRA.
2. A batch of several adapters and the base gives each what it gets alone.
3. Sampled logprobs equal the trainer's within 1e-4.
4. A completion is a function of its request alone when one sequence is live at a time, bit for bit.
5. What is sampled follows the exact distribution under temperature and top-p.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.rollouts.requests import Generation
from engine.rollouts.sampler import Row, Sampler
from engine.types import SamplingParams, TrainGroup
from tests.engines import Engine, busy_adapter, make_engine

GREEDY = SamplingParams(max_tokens=24, temperature=0)


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> Engine:
    return make_engine(tiny_model)


def prompt(engine: Engine, text: str) -> np.ndarray[Any, np.dtype[np.int32]]:
    return np.array(engine.tokenizer(text)["input_ids"], dtype=np.int32)


def generated_by_transformers(model: Any, tokens: np.ndarray[Any, Any]) -> list[int]:
    inputs = torch.tensor(tokens[None].astype(np.int64))
    output = model.generate(inputs, attention_mask=torch.ones_like(inputs), do_sample=False, max_new_tokens=24)
    return output[0, len(tokens) :].tolist()


@pytest.mark.parametrize("num_completions", [1, 3])
def test_greedy_equals_transformers(engine: Engine, tiny_model: Path, num_completions: int) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    prompts = [prompt(engine, text) for text in ("Hello, world", "a", "The quick brown fox " * 8)]
    results = engine.run(*(Generation("base", None, tokens, (GREEDY,) * num_completions) for tokens in prompts))
    for tokens, completions in zip(prompts, results, strict=True):
        expected = generated_by_transformers(model, tokens)
        assert [c.tokens.tolist() for c in completions] == [expected] * num_completions


def test_greedy_lora_equals_peft(engine: Engine, tiny_model: Path, tmp_path: Path) -> None:
    import json

    from peft import PeftModel

    adapter = busy_adapter(engine, "peft", seed=3)
    saved = engine.trainer.save("peft")
    (tmp_path / "adapter_model.safetensors").write_bytes(saved.weights)
    (tmp_path / "adapter_config.json").write_text(json.dumps(dict(saved.config)))
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32), str(tmp_path))
    tokens = prompt(engine, "Hello, world")
    [[completion]] = engine.run(Generation("a", adapter, tokens, (GREEDY,)))
    assert completion.tokens.tolist() == generated_by_transformers(model, tokens)
    [[plain]] = engine.run(Generation("a", None, tokens, (GREEDY,)))
    assert plain.tokens.tolist() != completion.tokens.tolist()


def test_mixed_batch_equals_alone(engine: Engine) -> None:
    adapters = [None, busy_adapter(engine, "one", seed=1), busy_adapter(engine, "two", seed=2, rank=4), None]

    def generations() -> list[Generation]:
        return [
            Generation(
                f"owner{i}",
                adapter,
                prompt(engine, f"prompt {i} " * (i + 1)),
                tuple(
                    SamplingParams(max_tokens=5 + 9 * j, temperature=1.0 if j else 0.0, seed=10 * i + j) for j in range(3 if i % 2 else 1)
                ),
            )
            for i, adapter in enumerate([*adapters, *adapters])
        ]

    together = engine.run(*generations())
    for generation, completions in zip(generations(), together, strict=True):
        [alone] = engine.run(generation)
        for a, b in zip(alone, completions, strict=True):
            assert a.tokens.tolist() == b.tokens.tolist()
            np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-5)
    assert engine.batcher.cache_bytes == 0


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_sampled_logprobs_equal_trainer(engine: Engine, temperature: float) -> None:
    adapter = busy_adapter(engine, "parity", seed=5)
    params = tuple(SamplingParams(max_tokens=40, temperature=temperature, seed=i) for i in range(6))
    prompts = [prompt(engine, "order number please"), prompt(engine, "hi")]
    results = engine.run(*(Generation("p", adapter, tokens, params) for tokens in prompts))
    groups = [
        TrainGroup(tokens, tuple(c.tokens for c in completions), np.zeros(6, np.float32), np.ones(6, np.float32))
        for tokens, completions in zip(prompts, results, strict=True)
    ]
    turns = engine.trainer.forward("parity", groups, temperature=temperature)
    while True:
        try:
            next(turns)
        except StopIteration as end:
            trained = end.value
            break
    for completions, group in zip(results, trained, strict=True):
        for completion, logprobs in zip(completions, group, strict=True):
            np.testing.assert_allclose(completion.logprobs, logprobs, atol=1e-4)


def test_one_sequence_at_a_time_is_bit_for_bit(tiny_model: Path) -> None:
    engine = make_engine(tiny_model, max_num_seqs=1)
    adapter = busy_adapter(engine, "a", seed=1)
    params = tuple(SamplingParams(max_tokens=30, seed=s) for s in (7, 8, 9))

    def mine() -> Generation:
        return Generation("mine", adapter, prompt(engine, "my own prompt"), params)

    def others() -> list[Generation]:
        return [
            Generation(f"o{i}", None, prompt(engine, "x" * (40 * i + 1)), (SamplingParams(max_tokens=90, seed=i),) * 2) for i in range(3)
        ]

    [alone] = engine.run(mine())
    before = others()
    crowded = engine.run(*before[:2], mine(), *before[2:])[2]
    for a, b in zip(alone, crowded, strict=True):
        assert a.tokens.tolist() == b.tokens.tolist()
        assert a.logprobs.tobytes() == b.logprobs.tobytes()
        assert a.text == b.text
    assert len({c.text for c in alone}) == 3


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.5, 1.0), (1.0, 0.6), (1.5, 0.9)])
@pytest.mark.parametrize("vocab_size", [20, 700])
@pytest.mark.parametrize("shared", [True, False])
def test_sampled_tokens_follow_the_distribution(temperature: float, top_p: float, vocab_size: int, shared: bool) -> None:
    logits_V = torch.randn(vocab_size, generator=torch.Generator().manual_seed(0)) * 2
    num_draws = 20_000 if top_p == 1 else 4_000
    rows = [Row(temperature, top_p, seed, position=3) for seed in range(num_draws)]
    hidden_1N = torch.ones(1, 1 if shared else num_draws)
    draws = Sampler(logits_V[:, None]).draw(hidden_1N, rows)
    probs_V = torch.softmax(logits_V.double() / temperature, dim=-1)
    order = probs_V.argsort(descending=True)
    kept = order[: int((probs_V[order].cumsum(0) < top_p).sum()) + 1] if top_p < 1 else order
    expected_V = torch.zeros(vocab_size, dtype=torch.float64)
    expected_V[kept] = probs_V[kept] / probs_V[kept].sum()
    counts_V = np.bincount([d.token for d in draws], minlength=vocab_size)
    assert set(np.flatnonzero(counts_V)) <= set(kept.tolist())
    live = expected_V.numpy() * num_draws > 5
    deviations = (counts_V - expected_V.numpy() * num_draws)[live] / np.sqrt(expected_V.numpy() * num_draws)[live]
    assert np.abs(deviations).max() < 4.5
    np.testing.assert_allclose([d.logprob for d in draws[:100]], [float(probs_V[d.token].log()) for d in draws[:100]], atol=1e-5)

"""What is proposed for a job, against the figures of the sources."""

import subprocess
import sys
from typing import Any

import pytest

from core.contracts import JobSpec
from engine.guidance import Advice, advise

SMOLLM2 = (134_515_008, 30)
LLAMA_8B = (8_030_261_248, 32)
QWEN_32B = (32_763_876_352, 64)
LLAMA_70B = (70_553_706_496, 80)
GRADER = {"type": "string_check", "name": "g", "operation": "eq", "input": "{{sample.output_text}}", "reference": "x"}


def job(**changes: Any) -> JobSpec:
    algorithm = changes.get("algorithm", {"name": "grpo"})
    method: dict[str, Any] = {"supervised": {}} if algorithm["name"] in ("sft", "dpo") else {"reinforcement": {"grader": GRADER}}
    value = {"base_model": "base", "training_file_sha256": "0" * 64, "seed": 0, "num_steps": 200, **method, **changes}
    return JobSpec.model_validate(value)


def found(spec: JobSpec, base: tuple[int, int], *, num_rows: int = 1000) -> dict[str, Advice]:
    return {advice.field: advice for advice in advise(spec, *base, num_rows)}


def test_defaults_need_no_warning() -> None:
    for base in (SMOLLM2, LLAMA_8B):
        advices = found(job(), base)
        assert advices.keys() == {"optimizer.learning_rate", "lora.rank", "lora.alpha"}
        assert all(advice.warning is None or advice.field == "optimizer.learning_rate" for advice in advices.values())
    assert found(job(), SMOLLM2)["optimizer.learning_rate"].warning is None


@pytest.mark.parametrize(("base", "rank"), [(SMOLLM2, 16), (LLAMA_8B, 16), (QWEN_32B, 32), (LLAMA_70B, 64)])
def test_ranks_by_size_are_verls(base: tuple[int, int], rank: int) -> None:
    assert found(job(), base)["lora.rank"].proposed == rank


def test_rates_are_mindspeeds_and_fall_with_size() -> None:
    """3e-5 for LoRA against 2e-6 on 32B (a short run's 15 times), and about the demo's range on 135M."""
    short = found(job(num_steps=100), QWEN_32B)["optimizer.learning_rate"]
    assert short.proposed == pytest.approx(3e-5)
    assert found(job(num_steps=101), QWEN_32B)["optimizer.learning_rate"].proposed == pytest.approx(2e-5)
    full = job(num_steps=1000, lora={"kind": "full"}, optimizer={"learning_rate": 2e-6})
    assert found(full, QWEN_32B).keys() == {"optimizer.learning_rate"}
    assert found(full, QWEN_32B)["optimizer.learning_rate"].proposed == pytest.approx(2e-6)
    rates = [found(job(), base)["optimizer.learning_rate"].proposed for base in (SMOLLM2, LLAMA_8B, QWEN_32B, LLAMA_70B)]
    assert rates == sorted(rates, reverse=True)
    assert rates[0] == pytest.approx(1e-4)
    # Whatever the rank.
    assert found(job(lora={"rank": 128}), SMOLLM2)["optimizer.learning_rate"].proposed == rates[0]


def test_supervised_rates_are_those_of_lora_without_regret() -> None:
    """Its formula for Llama-3.1-8B (hidden 4096): 5e-5 * 10 * (2000 / 4096) ** 0.781 = 2.9e-4; the hidden size here is an estimate."""
    assert found(job(algorithm={"name": "sft"}), LLAMA_8B)["optimizer.learning_rate"].proposed == pytest.approx(2.9e-4, rel=0.15)


def test_dpo_takes_ten_times_trls_default() -> None:
    assert found(job(algorithm={"name": "dpo"}), LLAMA_8B)["optimizer.learning_rate"].proposed == pytest.approx(1e-5)


@pytest.mark.parametrize(("rate", "words"), [(1e-4, None), (3e-4, None), (5e-3, "collapse"), (1e-5, "before it has learned")])
def test_rates_far_off_are_warned_of(rate: float, words: str | None) -> None:
    warning = found(job(optimizer={"learning_rate": rate}), SMOLLM2)["optimizer.learning_rate"].warning
    assert (warning is None) if words is None else (warning is not None and words in warning)
    # The multiplier counts.
    spec = job(optimizer={"learning_rate": rate / 10})
    spec = spec.model_copy(
        update={
            "reinforcement": spec.reinforcement
            and spec.reinforcement.model_copy(
                update={"hyperparameters": spec.reinforcement.hyperparameters.model_copy(update={"learning_rate_multiplier": 10.0})}
            )
        }
    )
    assert found(spec, SMOLLM2)["optimizer.learning_rate"].asked == pytest.approx(rate)


def test_rl_fits_the_lowest_rank_and_a_large_supervised_file_does_not() -> None:
    """10,000 problems x 32 samples are 320k bits; rank 1 of an 8B model is 3M parameters (LoRA Without Regret)."""
    rl = job(lora={"rank": 1, "alpha": 32}, algorithm={"name": "grpo", "group_size": 32}, num_steps=1250)
    assert "320k episodes" in found(rl, LLAMA_8B, num_rows=10_000)["lora.rank"].reason
    assert found(rl, LLAMA_8B, num_rows=10_000)["lora.rank"].warning is None
    assert "holds 5.85M" in found(rl, LLAMA_8B)["lora.rank"].reason
    sft = job(algorithm={"name": "sft"}, lora={"rank": 8}, rollout={"max_tokens": 1024})
    advice = found(sft, LLAMA_8B, num_rows=500_000)["lora.rank"]
    assert advice.proposed == 128
    assert advice.warning is not None
    assert "stop learning" in advice.warning
    assert found(sft, LLAMA_8B, num_rows=100)["lora.rank"].proposed == 16
    wide = found(job(lora={"rank": 512}), SMOLLM2)["lora.rank"].warning
    assert wide is not None
    assert "costs memory" in wide
    budget = found(job(lora={"rank": 32, "rank_budget": {"mean_rank": 6.5}}), SMOLLM2)
    assert budget["lora.rank_budget.mean_rank"].asked == 6.5


def test_alpha_attention_batch_and_stack() -> None:
    assert found(job(lora={"rank": 64, "alpha": 64}), SMOLLM2)["lora.alpha"].warning is None
    far = found(job(lora={"alpha": 512}), SMOLLM2)["lora.alpha"].warning
    assert far is not None
    assert "16 times as large" in far
    assert found(job(lora={"rank": 16, "alpha": 8, "rslora": True}), SMOLLM2)["lora.alpha"].proposed == 8
    attention = found(job(lora={"target_modules": ["q_proj", "v_proj"]}), SMOLLM2)["lora.target_modules"]
    assert attention.warning is not None
    assert found(job(lora={"target_modules": ["q_proj", "up_proj"]}), SMOLLM2)["lora.target_modules"].warning is None
    assert "lora.target_modules" not in found(job(), SMOLLM2)
    crowded = job(algorithm={"name": "grpo", "group_size": 256})
    assert found(crowded, SMOLLM2)["hyperparameters.batch_size"].proposed == 4
    stacked = job(
        start_from="a" * 64, start_mode="stack", start_lora={"rank": 8}, start_learning_rate=1e-5, optimizer={"learning_rate": 5e-4}
    )
    assert found(stacked, SMOLLM2)["start_learning_rate"].proposed == pytest.approx(1e-5)
    assert found(stacked, SMOLLM2)["start_learning_rate"].warning is None
    assert "lora.rank" in found(stacked, SMOLLM2)
    # What is continued keeps its shape.
    assert "lora.rank" not in found(job(start_from="a" * 64), SMOLLM2)


def test_it_reads_as_one_sentence_after_another() -> None:
    advice = found(job(optimizer={"learning_rate": 5e-3}), SMOLLM2)["optimizer.learning_rate"]
    assert str(advice).startswith("optimizer.learning_rate: 0.0001 is proposed, 0.005 asked. Full fine-tuning takes about")
    assert str(advice).endswith(advice.warning or "")


def test_the_api_can_show_it_without_torch() -> None:
    code = "import sys; import engine.guidance; assert not {'torch', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)

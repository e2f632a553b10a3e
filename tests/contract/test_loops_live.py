"""Every objective as a job's loop against a real engine host over HTTP: two jobs of each kind at once, in one engine.

1. Each step changes the adapter, its numbers are finite, and trainer and sampler agree on what they hold.
2. What an objective is for shows: sft's and dpo's losses fall on what they train on.
3. A stacked job leaves as one adapter of both ranks.
"""

import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from core.contracts import LoraSettings
from engine.client import EngineClient
from engine.grpo import GrpoLoop
from engine.loop.rows import PromptRow
from engine.supervised import SupervisedLoop
from engine.types import StackedOn
from tests.engines import LiveHost, live_host
from tests.loops import make_rows, make_spec

PRINTABLE = "".join(map(chr, range(32, 127)))
"""What answers are compared with: an untrained model's bytes come near it by more or less."""
ALGORITHMS: dict[str, dict[str, Any]] = {
    "grpo": {"name": "grpo", "entropy_bonus": 0.01},
    "grpo, two updates, TIS": {"name": "grpo", "updates_per_rollout": 2, "importance_cap": 2.0},
    "grpo, rejection": {"name": "grpo", "importance_cap": 1.5, "importance_mode": "reject"},
    "dr_grpo": {"name": "dr_grpo"},
    "dapo": {"name": "dapo"},
    "gspo": {"name": "gspo", "updates_per_rollout": 2},
    "cispo": {"name": "cispo", "updates_per_rollout": 2},
    "rloo": {"name": "rloo"},
    "flowrl": {"name": "flowrl"},
    "sft": {"name": "sft"},
    "dpo": {"name": "dpo"},
}


@pytest.fixture(scope="module")
def live(tiny_model: Path) -> Iterator[LiveHost]:
    with live_host(tiny_model) as host:
        yield host


def loop_of(client: EngineClient, adapter_id: str, algorithm: dict[str, Any], rows: list[PromptRow]) -> GrpoLoop | SupervisedLoop:
    group_size = {} if algorithm["name"] in ("sft", "dpo") else {"group_size": 4}
    spec = make_spec(
        algorithm={**group_size, **algorithm}, base_model="tiny", rollout={"max_tokens": 12}, optimizer={"learning_rate": 2e-2}
    )
    make = GrpoLoop if spec.algorithm.samples else SupervisedLoop
    loop = make(client, adapter_id, spec, rows, [], 6)
    loop.begin(client.create_adapter(adapter_id, spec.lora, seed=1).fingerprint)
    return loop


@pytest.mark.parametrize("name", ALGORITHMS)
def test_two_jobs_of_a_kind_at_once(live: LiveHost, name: str) -> None:
    algorithm = ALGORITHMS[name]
    rows = [replace(row, item={"answer": PRINTABLE}) for row in make_rows(4, answers=("better", "no") if name == "dpo" else ("yes",))]
    num_steps = 6 if name in ("sft", "dpo") else 2

    def run(number: int) -> list[dict[str, float]]:
        with EngineClient(live.url, owner=f"tenant-{number}") as client:
            adapter_id = f"{name}-{number}"
            loop, fingerprints, metrics = loop_of(client, adapter_id, algorithm, rows), [""], list[dict[str, float]]()
            for step in range(num_steps):
                result = loop.run_step(step)
                assert result.fingerprint != fingerprints[-1] or not result.metrics["num_tokens"]
                assert client.sync(adapter_id) == result.fingerprint
                assert all(math.isfinite(value) for value in result.metrics.values())
                fingerprints.append(result.fingerprint)
                metrics.append(result.metrics)
            client.drop_adapter(adapter_id)
            return metrics

    with ThreadPoolExecutor(2) as pool:
        outcomes = list(pool.map(run, range(2)))
    for metrics in outcomes:
        assert any(each["num_tokens"] > 0 for each in metrics)
        if num_steps == 6:
            assert metrics[-1]["loss"] < metrics[0]["loss"]


def test_a_stacked_job_leaves_as_one_adapter(live: LiveHost) -> None:
    lora = LoraSettings(rank=2, target_modules=("q_proj",))
    with EngineClient(live.url) as client:
        first = loop_of(client, "first", ALGORITHMS["sft"], make_rows(4))
        first.run_step(0)
        under = StackedOn(client.save("first").weights, lora, trainable=True)
        spec = make_spec(
            base_model="tiny",
            rollout={"max_tokens": 12},
            optimizer={"learning_rate": 2e-2, "learning_rate_groups": [{"learning_rate": 1e-3, "part": "start"}]},
        )
        loop = GrpoLoop(client, "second", spec, [replace(row, item={"answer": PRINTABLE}) for row in make_rows(4)], [], 2)
        loop.begin(client.create_adapter("second", lora, seed=5, under=under).fingerprint)
        results = [loop.run_step(step) for step in range(2)]
        assert results[0].metrics["kl"] == pytest.approx(0, abs=1e-6), "the reference is the adapter underneath"
        assert client.save("second").config["r"] == 4

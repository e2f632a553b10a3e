"""The local engine on the real base: sampled logprobs equal the trainer's within 1e-4 in float32."""

from pathlib import Path

import numpy as np
import pytest

from core.settings import Settings
from engine.base_model import ensure_base_model
from engine.rollouts.requests import Generation
from engine.types import SamplingParams, TrainGroup
from tests.engines import busy_adapter, make_engine


@pytest.mark.slow
def test_sampled_logprobs_equal_trainer(tmp_path: Path) -> None:
    engine = make_engine(ensure_base_model(Settings(data_dir=tmp_path)), max_model_len=2048)
    adapters = {name: busy_adapter(engine, name, seed=i, rank=16, scale=0.01) for i, name in enumerate(("a", "b"))}
    params = tuple(SamplingParams(max_tokens=24, temperature=0.8, seed=i) for i in range(4))
    prompts = [np.array(engine.tokenizer(text)["input_ids"], np.int32) for text in ("Order RA-5892 has not come. " * 6, "Hello")]
    generations = [Generation(name, adapter, tokens, params) for name, adapter in adapters.items() for tokens in prompts]
    results = engine.run(*generations)
    for name, mine in (("a", slice(0, 2)), ("b", slice(2, 4))):
        groups = [
            TrainGroup(tokens, tuple(c.tokens for c in completions), np.zeros(4, np.float32), np.ones(4, np.float32))
            for tokens, completions in zip(prompts, results[mine], strict=True)
        ]
        turns = engine.trainer.forward(name, groups, temperature=0.8)
        while True:
            try:
                next(turns)
            except StopIteration as end:
                trained = end.value
                break
        for completions, group in zip(results[mine], trained, strict=True):
            for completion, logprobs in zip(completions, group, strict=True):
                np.testing.assert_allclose(completion.logprobs, logprobs, atol=1e-4)

"""What is lost when a trained adapter leaves the engine."""

from collections.abc import Sequence

import numpy as np

from core.contracts import JobSpec
from engine.distillation import distilled_kl
from engine.loop.rollout import sampling_params
from engine.loop.rows import PromptRow, sample_seed
from engine.types import SampleRequest, TrainGroup, Verbs

NUM_PROMPTS = 16


def export_cost(verbs: Verbs, adapter_id: str, spec: JobSpec, rows: Sequence[PromptRow], num_steps: int) -> dict[str, float]:
    """{"distilled_kl": nats a token} where a mixture leaves as one adapter, since servers can't gate; else nothing.

    Args:
        rows: prompts that it is estimated on, by one completion each; the first NUM_PROMPTS count.
        num_steps: steps done, for the seeds.
    """
    if spec.lora.num_experts == 1:
        return {}
    verbs.sync(adapter_id)
    prompts = verbs.render([row.messages for row in rows[:NUM_PROMPTS]])
    seeds = [sample_seed(spec.seed, num_steps, row, 0) for row in range(len(prompts))]
    requests = [SampleRequest(p, (sampling_params(spec.rollout, seed=seed),)) for p, seed in zip(prompts, seeds, strict=True)]
    nothing = np.zeros(1, np.float32)
    sampled = zip(prompts, verbs.sample(adapter_id, requests), strict=True)
    groups = [TrainGroup(prompt, (done[0].tokens,), nothing, nothing) for prompt, done in sampled]
    return {"distilled_kl": distilled_kl(verbs, adapter_id, groups, temperature=spec.rollout.temperature)}

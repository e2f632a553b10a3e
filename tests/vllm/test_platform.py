"""The main job with real vLLM: rollouts and serving by it, through the public API."""

import io
import itertools
import tarfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np
import openai
import pytest
import torch
from openai.types.fine_tuning import FineTuningJob
from peft import PeftModel
from safetensors.numpy import load
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.platform import DETERMINISTIC, Platform, steps_done, submit, wait_for
from tests.tiny import write_tiny_model
from tests.vllm.server import VllmServer, vllm_server

pytestmark = pytest.mark.vllm
NUM_STEPS = 8
PROMPT = "say bravo"


@pytest.fixture(scope="module")
def base_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return write_tiny_model(tmp_path_factory.mktemp("base"), num_heads=2)


@pytest.fixture(scope="module")
def replica(tmp_path_factory: pytest.TempPathFactory, base_model: Path) -> Iterator[VllmServer]:
    folder = tmp_path_factory.mktemp("platform")
    environment = {
        "ESPALIER_STORE_URL": str(folder / "data" / "store"), "ESPALIER_RESOLVER_CACHE": str(folder / "cache"),
        "ESPALIER_BASE_MODEL_NAME": "tiny", "ESPALIER_VLLM_MAX_LORAS": "2",
    }  # fmt: skip
    with vllm_server(folder, base_model=base_model, environment=environment) as running:
        yield running


@pytest.fixture(scope="module")
def platform(replica: VllmServer, base_model: Path) -> Iterator[Platform]:
    url = replica.url.rstrip("/")
    environment = {**DETERMINISTIC, "ESPALIER_ROLLOUTS": "vllm", "ESPALIER_VLLM_URL": url, "ESPALIER_REPLICA_URLS": url}
    running = Platform(replica.log.parent / "data", base_model, environment)
    running.start()
    yield running
    assert running.stop() == 0


@pytest.fixture(scope="module")
def acme(platform: Platform) -> openai.OpenAI:
    return platform.client("acme")


@pytest.fixture(scope="module")
def job(acme: openai.OpenAI) -> FineTuningJob:
    done = wait_for(acme, submit(acme, num_steps=NUM_STEPS))
    assert done.status == "succeeded", done.error
    return done


def test_vllm_samples_what_the_trainer_scores(acme: openai.OpenAI, job: FineTuningJob) -> None:
    metrics = [e.data for e in acme.fine_tuning.jobs.list_events(job.id, limit=100).data if e.type == "metrics"]
    gaps = [m["sampler_trainer_logprob_gap_max"] for m in metrics if "sampler_trainer_logprob_gap_max" in m]  # type: ignore[index,operator]
    assert len(gaps) >= NUM_STEPS // 2
    assert max(gaps) < 1e-4  # float32 on both sides


def test_vllm_keeps_no_training_adapter(replica: VllmServer, job: FineTuningJob) -> None:
    names = [m["id"] for m in replica.client.get("/v1/models").json()["data"]]
    assert not [name for name in names if name.startswith("train/")], job.id


def test_the_adapter_is_served_by_vllm_through_the_gateway(
    platform: Platform,
    acme: openai.OpenAI,
    job: FineTuningJob,
    replica: VllmServer,
    base_model: Path,
    tmp_path: Path,
) -> None:
    assert job.fine_tuned_model is not None
    served = acme.completions.create(model=job.fine_tuned_model, prompt=PROMPT, max_tokens=10, temperature=0, logprobs=1)
    assert served.model == job.fine_tuned_model
    digest = job.fine_tuned_model.rsplit("@", 1)[1]
    names = [m["id"] for m in replica.client.get("/v1/models").json()["data"]]
    assert any(digest in name for name in names), names
    assert served.choices[0].logprobs is not None
    want = served.choices[0].logprobs.token_logprobs
    assert want

    _extract(_download(platform, acme, job.fine_tuned_model), tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(base_model)
    peft = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base_model, dtype=torch.float32), tmp_path)
    prompt = tokenizer(PROMPT, return_tensors="pt").input_ids
    with torch.no_grad():
        tokens = peft.generate(input_ids=prompt, max_new_tokens=10, do_sample=False)
        logprobs = torch.log_softmax(peft(tokens).logits[0, prompt.shape[1] - 1 : -1], -1)
    got = logprobs.gather(1, tokens[0, prompt.shape[1] :, None])[:, 0].tolist()
    assert max(abs(a - b) for a, b in zip(want, got, strict=True)) < 1e-4


def test_a_mixed_batch_with_all_slots_taken_leaks_nothing(acme: openai.OpenAI, platform: Platform) -> None:
    others = [wait_for(acme, submit(acme, num_steps=4, seed=seed, suffix=f"other{seed}", checkpoint_interval=4)) for seed in (21, 22)]
    models = ["tiny", *(str(other.fine_tuned_model) for other in others)]

    def ask(model: str) -> np.ndarray:
        answer = acme.completions.create(model=model, prompt=PROMPT, max_tokens=10, temperature=0, logprobs=1)
        assert answer.choices[0].logprobs is not None
        return np.array(answer.choices[0].logprobs.token_logprobs)

    alone = {model: ask(model) for model in models}
    for one, other in itertools.combinations(models, 2):
        assert np.abs(alone[one] - alone[other]).max() > 1e-2, "adapters that answer alike can't show a leak"
    with ThreadPoolExecutor(12) as pool:
        asked = models * 8
        for model, got in zip(asked, pool.map(ask, asked), strict=True):
            np.testing.assert_allclose(got, alone[model], atol=1e-4, err_msg=model)


def test_a_killed_worker_with_vllm_rollouts_ends_close_to_an_unbroken_run(
    platform: Platform, job: FineTuningJob, acme: openai.OpenAI, record_property: Callable[[str, object], None]
) -> None:
    """vLLM's numerics depend on what shares its batch, so the digest may differ: the difference is measured and printed."""
    client = platform.client("killed")
    job_id = submit(client, num_steps=NUM_STEPS)
    while steps_done(client, job_id) < NUM_STEPS // 2:
        time.sleep(0.05)
    platform.kill("worker")
    resumed = wait_for(client, job_id)
    assert resumed.status == "succeeded", resumed.error
    ours, theirs = (
        _weights(_download(platform, c, str(model))) for c, model in ((client, resumed.fine_tuned_model), (acme, job.fine_tuned_model))
    )
    difference = max(float(np.abs(ours[key] - theirs[key]).max()) for key in ours)
    largest = max(float(np.abs(theirs[key]).max()) for key in theirs)
    record_property("max_abs_difference", difference)
    print(f"resumed against unbroken with vLLM rollouts: max abs difference {difference:.2e} (largest weight {largest:.2e})")
    # A step moves a weight by about the learning rate at most: two runs that part at the kill are within this of each other.
    assert difference <= 2 * 3e-3 * NUM_STEPS


def _download(platform: Platform, client: openai.OpenAI, model: str) -> bytes:
    adapter, digest = model.split("/")[1].split("@")
    answer = httpx.get(
        f"{platform.url}/v1/adapters/{adapter}/versions/{digest}/content", headers={"Authorization": f"Bearer {client.api_key}"}
    )
    answer.raise_for_status()
    return answer.content


def _extract(content: bytes, folder: Path) -> None:
    with tarfile.open(fileobj=io.BytesIO(content)) as tar:
        for member in tar.getmembers():
            data = tar.extractfile(member)
            assert data is not None
            (folder / Path(member.name).name).write_bytes(data.read())


def _weights(content: bytes) -> dict[str, np.ndarray]:
    with tarfile.open(fileobj=io.BytesIO(content)) as tar:
        member = next(m for m in tar.getmembers() if m.name.endswith(".safetensors"))
        data = tar.extractfile(member)
        assert data is not None
        return load(data.read())

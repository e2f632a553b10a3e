"""The main job on real parts: upload, train, publish, serve, download; by the stock `openai` client and stock PEFT."""

import hashlib
import io
import tarfile
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.platform import Platform, submit, wait_for

PROMPT = [{"role": "user", "content": "say alpha 0"}]


@pytest.fixture(scope="module")
def platform(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[Platform]:
    running = Platform(tmp_path_factory.mktemp("e2e") / "data", tiny_model, {"ESPALIER_DTYPE": "float32"})
    running.start()
    yield running
    assert running.stop() == 0


@pytest.fixture(scope="module")
def acme(platform: Platform) -> openai.OpenAI:
    return platform.client("acme")


@pytest.fixture(scope="module")
def model(platform: Platform, acme: openai.OpenAI) -> str:
    """The fine-tuned name of a finished job."""
    job = wait_for(acme, submit(acme, num_steps=6))
    assert job.status == "succeeded", job.error
    assert job.trained_tokens > 0
    assert job.finished_at >= job.created_at
    assert isinstance(job.fine_tuned_model, str)
    return job.fine_tuned_model


def test_the_job_leaves_metrics_and_checkpoints(acme: openai.OpenAI, model: str) -> None:
    (job,) = acme.fine_tuning.jobs.list().data
    metrics = [e.data for e in acme.fine_tuning.jobs.list_events(job.id, limit=100).data if e.type == "metrics"]
    assert {m["step"] for m in metrics} == set(range(1, 7))  # type: ignore[index]
    for name in ("reward_mean", "kl", "grad_norm", "tokens_per_s"):
        assert all(name in m for m in metrics), name  # type: ignore[operator]
    checkpoints = acme.fine_tuning.jobs.checkpoints.list(job.id).data
    assert [c.step_number for c in checkpoints] == [6, 4]
    assert checkpoints[0].fine_tuned_model_checkpoint == model


def test_the_adapter_is_a_model_of_its_project_only(platform: Platform, acme: openai.OpenAI, model: str) -> None:
    assert {"tiny", model} <= {m.id for m in acme.models.list().data}
    assert acme.models.retrieve(model).id == model
    stranger = platform.client("stranger")
    assert {m.id for m in stranger.models.list().data} == {"tiny"}
    with pytest.raises(openai.NotFoundError):
        stranger.models.retrieve(model)
    with pytest.raises(openai.NotFoundError):
        stranger.chat.completions.create(model=model, messages=PROMPT)  # type: ignore[arg-type]


def test_base_and_adapter_answer_streamed_and_not(acme: openai.OpenAI, model: str) -> None:
    texts = {}
    for name in ("tiny", model):
        whole = acme.chat.completions.create(model=name, messages=PROMPT, max_tokens=12, temperature=0)  # type: ignore[arg-type]
        assert whole.model == name
        assert whole.usage is not None
        assert whole.usage.completion_tokens > 0
        stream = acme.chat.completions.create(model=name, messages=PROMPT, max_tokens=12, temperature=0, stream=True)  # type: ignore[arg-type]
        streamed = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
        assert streamed == whole.choices[0].message.content
        texts[name] = streamed
    assert texts["tiny"] != texts[model], "the adapter answers like its base"


def test_what_is_downloaded_gives_the_served_logprobs_in_stock_peft(
    platform: Platform, acme: openai.OpenAI, model: str, tiny_model: Path, tmp_path: Path
) -> None:
    adapter, digest = model.split("/")[1].split("@")
    answer = httpx.get(
        f"{platform.url}/v1/adapters/{adapter}/versions/{digest}/content", headers={"Authorization": f"Bearer {acme.api_key}"}
    )
    answer.raise_for_status()
    assert answer.headers["x-checksum-sha256"] == hashlib.sha256(answer.content).hexdigest()
    with tarfile.open(fileobj=io.BytesIO(answer.content)) as tar:
        tar.extractall(tmp_path, filter="data")
    folder = next(p.parent for p in tmp_path.rglob("adapter_config.json"))
    served = acme.completions.create(model=model, prompt="say bravo", max_tokens=10, temperature=0, logprobs=1)
    assert served.choices[0].logprobs is not None
    want = served.choices[0].logprobs.token_logprobs
    assert want

    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    base = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    peft = PeftModel.from_pretrained(base, folder)
    prompt = tokenizer("say bravo", return_tensors="pt").input_ids
    with torch.no_grad():
        tokens = peft.generate(input_ids=prompt, max_new_tokens=10, do_sample=False)
        logprobs = torch.log_softmax(peft(tokens).logits[0, prompt.shape[1] - 1 : -1], -1)
    got = logprobs.gather(1, tokens[0, prompt.shape[1] :, None])[:, 0]
    assert len(want) == len(got)
    assert max(abs(a - b) for a, b in zip(want, got.tolist(), strict=True)) < 1e-4

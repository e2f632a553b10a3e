"""The serving routes, driven by the real `openai` client and raw HTTP against a live host over the tiny base."""

import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.engines import LiveHost, live_host

CHAT = [{"role": "user", "content": "hello there"}]
NAME = "tenant/project/tone@" + "a" * 64


@pytest.fixture(scope="module")
def live(tiny_model: Path) -> Iterator[LiveHost]:
    with live_host(tiny_model, max_serving_adapters=2) as host:
        yield host


@pytest.fixture
def client(live: LiveHost) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0) as sdk:
        yield sdk


def peft_folder(tiny_model: Path, folder: Path, *, seed: int = 0, **config: Any) -> Path:
    """An adapter as stock PEFT saves it, B not zero."""
    torch.manual_seed(seed)
    base = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    settings = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "down_proj"], "task_type": "CAUSAL_LM", **config}
    model = get_peft_model(base, LoraConfig(**settings))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(folder)
    return folder


@pytest.fixture
def loaded(live: LiveHost, tiny_model: Path, tmp_path: Path) -> Iterator[Path]:
    folder = peft_folder(tiny_model, tmp_path / "adapter")
    assert load(live, NAME, folder).status_code == 200
    yield folder
    unload(live, NAME)


def load(live: LiveHost, name: str, folder: Path) -> httpx.Response:
    return httpx.post(f"{live.url}/v1/load_lora_adapter", json={"lora_name": name, "lora_path": str(folder)})


def unload(live: LiveHost, name: str) -> httpx.Response:
    return httpx.post(f"{live.url}/v1/unload_lora_adapter", json={"lora_name": name})


def test_models_and_unload(live: LiveHost, client: openai.OpenAI, loaded: Path) -> None:
    assert [m.id for m in client.models.list()] == ["tiny", NAME]
    again = load(live, NAME, loaded)
    assert again.status_code == 400
    assert "already" in again.json()["error"]["message"]
    assert unload(live, NAME).status_code == 200
    assert [m.id for m in client.models.list()] == ["tiny"]
    assert unload(live, NAME).status_code == 404
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model=NAME, messages=CHAT)
    assert caught.value.body == {"message": f"The model `{NAME}` does not exist.", "type": "NotFoundError", "param": "model", "code": 404}


@pytest.mark.parametrize(
    "config", [{}, {"use_rslora": True}, {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"v_proj": 32}}, {"layers_to_transform": [1]}]
)
def test_an_adapter_answers_as_peft_does(
    live: LiveHost, client: openai.OpenAI, tiny_model: Path, tmp_path: Path, config: dict[str, Any]
) -> None:
    folder = peft_folder(tiny_model, tmp_path / "adapter", **config)
    assert load(live, NAME, folder).status_code == 200
    try:
        answers = {
            model: client.completions.create(model=model, prompt=[5, 6, 7, 8], max_tokens=12, temperature=0, logprobs=1).choices[0]
            for model in (NAME, "tiny")
        }
    finally:
        unload(live, NAME)
    model: Any = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32), str(folder))
    with torch.no_grad():
        logprobs = torch.log_softmax(model(torch.tensor([[5, 6, 7, 8]])).logits[0, -1], dim=-1)
    first = answers[NAME].logprobs
    assert first is not None
    assert first.token_logprobs is not None
    assert first.token_logprobs[0] == pytest.approx(float(logprobs.max()), abs=1e-5)
    assert answers[NAME].text != answers["tiny"].text


def test_streaming_equals_not_streaming(client: openai.OpenAI, loaded: Path) -> None:
    for model in ("tiny", NAME):
        for stop in (None, ["e", "xx"]):
            wanted: dict[str, Any] = {
                "model": model, "messages": CHAT, "max_tokens": 40, "seed": 3, "n": 3, "temperature": 1.3, "top_p": 0.95, "stop": stop,
                "logprobs": True, "top_logprobs": 2,
            }  # fmt: skip
            whole = client.chat.completions.create(**wanted)
            texts, finished, tokens = ["", "", ""], ["", "", ""], [0, 0, 0]
            usage = None
            for chunk in client.chat.completions.create(**wanted, stream=True, stream_options={"include_usage": True}):
                usage = chunk.usage or usage
                for choice in chunk.choices:
                    texts[choice.index] += choice.delta.content or ""
                    finished[choice.index] = choice.finish_reason or finished[choice.index]
                    tokens[choice.index] += len((choice.logprobs and choice.logprobs.content) or [])
            assert texts == [c.message.content for c in whole.choices]
            assert finished == [c.finish_reason for c in whole.choices]
            assert tokens == [len(c.logprobs.content) for c in whole.choices]
            assert usage == whole.usage
            assert whole.usage.completion_tokens == sum(tokens)


def test_raw_stream_ends_with_usage_and_done(live: LiveHost) -> None:
    body = {"prompt": "abc", "max_tokens": 4, "stream": True, "stream_options": {"include_usage": True}, "cache_salt": "s", "user": "u"}
    response = httpx.post(f"{live.url}/v1/completions", json=body)
    assert response.headers["content-type"].startswith("text/event-stream")
    events = [line.removeprefix("data: ") for line in response.text.splitlines() if line]
    assert events[-1] == "[DONE]"
    usage = json.loads(events[-2])
    assert usage["choices"] == []
    assert usage["usage"]["prompt_tokens"] == 3


def test_prompts_of_every_kind(client: openai.OpenAI) -> None:
    text = client.completions.create(model="tiny", prompt="abc", max_tokens=6, temperature=0)
    ids = client.completions.create(model="tiny", prompt=[66, 67, 68], max_tokens=6, temperature=0)
    several = client.completions.create(model="tiny", prompt=["abc", "zzz"], max_tokens=6, temperature=0, n=2)
    assert [c.index for c in several.choices] == [0, 1, 2, 3]
    assert several.choices[0].text == several.choices[1].text == text.choices[0].text
    assert several.choices[2].text == several.choices[3].text
    assert ids.usage is not None
    assert ids.usage.prompt_tokens == 3


def test_seeds(client: openai.OpenAI) -> None:
    def ask(**wanted: Any) -> str:
        return client.completions.create(model="tiny", prompt="abc", max_tokens=16, temperature=1.5, **wanted).choices[0].text

    assert ask(seed=5) == ask(seed=5)
    assert len({ask(seed=5), ask(seed=6), ask(), ask()}) == 4


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("completions", {"prompt": "a", "echo": True}, "echo"),
        ("completions", {"prompt": "a", "temperature": -1}, "temperature"),
        ("completions", {"prompt": "a", "top_p": 0}, "top_p"),
        ("completions", {"prompt": "a", "n": 0}, "n"),
        ("completions", {"prompt": "a", "presence_penalty": 1.0}, "presence_penalty"),
        ("completions", {"prompt": "a", "stop": [""]}, "stop"),
        ("completions", {"prompt": []}, "prompt"),
        ("completions", {"prompt": [259]}, "prompt"),
        ("completions", {"prompt": "a", "max_tokens": 512}, "max_tokens"),
        ("completions", {"prompt": "a", "stream_options": {"include_usage": True}}, "stream_options"),
        ("chat/completions", {"messages": []}, "messages"),
        ("chat/completions", {"messages": [{"content": "x"}]}, "messages[0][0]"),
        ("chat/completions", {"messages": CHAT, "tools": [{"type": "function"}]}, "tools"),
        ("chat/completions", {"messages": CHAT, "response_format": {"type": "json_object"}}, "response_format"),
        ("chat/completions", {"messages": CHAT, "top_logprobs": 3}, "top_logprobs"),
        ("load_lora_adapter", {"lora_name": "x"}, "lora_path"),
        ("load_lora_adapter", {"lora_name": "../x", "lora_path": "/"}, "lora_name"),
        ("load_lora_adapter", {"lora_name": "a/../x", "lora_path": "/"}, "lora_name"),
        ("load_lora_adapter", {"lora_name": "tiny", "lora_path": "/"}, "lora_name"),
        ("load_lora_adapter", {"lora_name": "x", "lora_path": "/nowhere"}, "lora_path"),
    ],
)
def test_refusals(live: LiveHost, path: str, body: dict[str, Any], param: str) -> None:
    response = httpx.post(f"{live.url}/v1/{path}", json=body)
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["type"]) == (400, 400, "BadRequestError")
    assert error["param"] is not None
    assert error["param"].split(".")[0] == param


def spoil(folder: Path, kind: str) -> None:
    """Makes a good adapter a bad one."""
    config_file, weights_file = folder / "adapter_config.json", folder / "adapter_model.safetensors"
    config, weights = json.loads(config_file.read_text()), load_file(weights_file)
    some_key = "base_model.model.model.layers.0.mlp.down_proj.lora_A.weight"
    match kind:
        case "dora":
            config["use_dora"] = True
        case "rank_over":
            config["r"] = 1000
        case "rank_pattern_over":
            config["rank_pattern"] = {"q_proj": 1000}
        case "rank_differs":
            config["r"] = 8
        case "alpha_zero":
            config["lora_alpha"] = 0
        case "not_lora":
            config["peft_type"] = "IA3"
        case "saved_modules":
            config["modules_to_save"] = ["lm_head"]
        case "missing_key":
            del weights[some_key]
        case "missing_layer":
            weights = {k: v for k, v in weights.items() if "layers.1" not in k}
        case "unprefixed":
            weights = {k.removeprefix("base_model.model."): v for k, v in weights.items()}
        case "unexpected":
            weights["base_model.model.model.layers.7.mlp.down_proj.lora_A.weight"] = weights[some_key].clone()
        case "nan":
            weights[some_key][0, 0] = float("nan")
        case "shape":
            weights[some_key] = weights[some_key][:, :-1].contiguous()
        case "no_module":
            config["target_modules"], weights = ["nothing"], {}
        case "lfs":
            weights_file.write_text("version https://git-lfs.github.com/spec/v1\n")
        case "lfs_config":
            config_file.write_text("version https://git-lfs.github.com/spec/v1\n")
    if kind != "lfs":
        save_file(weights, weights_file)
    if kind != "lfs_config":
        config_file.write_text(json.dumps(config))


@pytest.mark.parametrize(
    "kind",
    ["dora", "rank_over", "rank_pattern_over", "rank_differs", "alpha_zero", "not_lora", "saved_modules", "missing_key", "missing_layer",
     "unprefixed", "unexpected", "nan", "shape", "no_module", "lfs", "lfs_config"],
)  # fmt: skip
def test_a_bad_adapter_is_refused_and_harms_nobody(live: LiveHost, client: openai.OpenAI, loaded: Path, tmp_path: Path, kind: str) -> None:
    bad = tmp_path / "bad"
    shutil.copytree(loaded, bad)
    spoil(bad, kind)
    ask: dict[str, Any] = {"model": NAME, "prompt": "abc", "max_tokens": 5, "temperature": 0}
    before = client.completions.create(**ask).choices[0].text
    response = load(live, "bad", bad)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "lora_path")
    assert [m.id for m in client.models.list()] == ["tiny", NAME]
    assert client.completions.create(**ask).choices[0].text == before


def test_the_least_recently_used_adapter_leaves(live: LiveHost, client: openai.OpenAI, tiny_model: Path, tmp_path: Path) -> None:
    folder = peft_folder(tiny_model, tmp_path / "adapter")
    for name in ("one", "two"):
        assert load(live, name, folder).status_code == 200
    client.completions.create(model="one", prompt="a", max_tokens=1)
    assert load(live, "three", folder).status_code == 200
    assert {m.id for m in client.models.list()} == {"tiny", "one", "three"}
    for name in ("one", "three"):
        unload(live, name)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_stops_its_sequences(live: LiveHost, stream: bool) -> None:
    body = {"prompt": "abc", "max_tokens": 500, "n": 8, "stream": stream, "temperature": 1.0}
    with httpx.Client(timeout=httpx.Timeout(60, read=60 if stream else 0.5)) as http:
        if stream:
            with http.stream("POST", f"{live.url}/v1/completions", json=body) as response:
                next(response.iter_lines())
        else:
            with pytest.raises(httpx.ReadTimeout):
                http.post(f"{live.url}/v1/completions", json=body)
    sampled = live.host.batcher.num_sampled_tokens
    deadline = time.monotonic() + 10
    while live.host.batcher.busy and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not live.host.batcher.busy
    assert live.host.batcher.num_sampled_tokens - sampled < 8 * 300
    assert live.host.batcher.cache_bytes == 0

"""Random PEFT adapters, published as the registry does, and the same model in transformers + PEFT to compare with."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

from registry.manifest import CONFIG_FILE, WEIGHTS_FILE, Manifest, manifest_key
from registry.replica_name import ReplicaName
from registry.store import ObjectStore

ALL_LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@dataclass(frozen=True)
class PublishedAdapter:
    """An adapter version in a store. `folder` holds the PEFT files; `scaling` is alpha / rank."""

    name: str
    digest: str
    folder: Path
    scaling: float

    @property
    def weights(self) -> bytes:
        """Content of the safetensors file."""
        return (self.folder / WEIGHTS_FILE).read_bytes()


def publish_folder(store: ObjectStore, folder: Path) -> str:
    """Stores a PEFT folder as an adapter version and returns its digest."""
    manifest = Manifest({name: store.put_blob((folder / name).read_bytes()) for name in (CONFIG_FILE, WEIGHTS_FILE)})
    store.put(manifest_key(manifest.digest), manifest.to_bytes())
    return manifest.digest


def publish_random_adapter(
    store: ObjectStore, base_model: Path, folder: Path, *, seed: int, rank: int = 8, alpha: int = 12, targets: Sequence[str] = ALL_LINEAR
) -> PublishedAdapter:
    """Makes an adapter whose A and B are random and big enough that its answers differ from the base's, and publishes it."""
    torch.manual_seed(seed)
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(base_model, dtype=torch.float32),
        LoraConfig(r=rank, lora_alpha=alpha, target_modules=list(targets), task_type="CAUSAL_LM", init_lora_weights=False),
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.1)
    model.save_pretrained(folder)
    digest = publish_folder(store, folder)
    return PublishedAdapter(str(ReplicaName("tenant-a", "support", f"tone{seed}", digest)), digest, folder, alpha / rank)


class Reference:
    """Greedy decoding and logprobs by transformers + PEFT in float32."""

    def __init__(self, base_model: Path, adapters: Sequence[PublishedAdapter]) -> None:
        self._model: Any = AutoModelForCausalLM.from_pretrained(base_model, dtype=torch.float32).eval()
        for adapter in adapters:
            if not isinstance(self._model, PeftModel):
                self._model = PeftModel.from_pretrained(self._model, adapter.folder, adapter_name=adapter.digest)
            else:
                self._model.load_adapter(adapter.folder, adapter_name=adapter.digest)
        self._model.eval()

    def logprobs(
        self, adapter: PublishedAdapter | None, prompt: list[int], completion: list[int], temperature: float = 1.0
    ) -> torch.Tensor:
        """Log-probabilities (nats) of the completion's tokens."""
        logits = self._logits(adapter, prompt + completion)[len(prompt) - 1 : -1] / temperature
        return torch.log_softmax(logits, -1).gather(1, torch.tensor(completion)[:, None])[:, 0]

    def greedy(self, adapter: PublishedAdapter | None, prompt: list[int], num_tokens: int) -> list[int]:
        """The most likely tokens, one after the other."""
        tokens = list(prompt)
        for _ in range(num_tokens):
            tokens.append(int(self._logits(adapter, tokens)[-1].argmax()))
        return tokens[len(prompt) :]

    def _logits(self, adapter: PublishedAdapter | None, tokens: list[int]) -> torch.Tensor:
        with torch.no_grad():
            if adapter is None:
                with self._model.disable_adapter():
                    return self._model(torch.tensor([tokens])).logits[0]
            self._model.set_adapter(adapter.digest)
            return self._model(torch.tensor([tokens])).logits[0]

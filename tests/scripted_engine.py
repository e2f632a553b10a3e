"""An engine whose numerics are arithmetic on hashes: deterministic to the bit, in-process, with the real engine's rules.

It keeps the rules that a job relies on: order (sync before sample), fencing by holder token, adapters lost at a restart, real PEFT bytes,
states that round-trip. Completions follow from (seed, fingerprint, prompt), updates from advantages and tokens, so any step that is
skipped, doubled or done from stale weights ends in another digest.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import numpy as np
from safetensors.numpy import load, save

from core.contracts import LoraSettings, OptimizerSettings
from core.errors import LeaseLost, NotFound, Unavailable
from engine.types import (
    AdapterInfo,
    BaseModelInfo,
    Completion,
    FloatArray,
    ForwardBackwardResult,
    IntArray,
    LossSettings,
    Message,
    OptimResult,
    SampleRequest,
    SavedAdapter,
    StackedOn,
    TrainGroup,
    Verbs,
)

WIDTH = 8
WORDS = ("yes", "no", "perhaps", '{"answer": "yes"}')
BASE = BaseModelInfo("scripted", "ba5e" * 16, 1, 256, 64, "cpu", "float32", (0,), 10_000)


@dataclass
class _Adapter:
    lora: LoraSettings
    factors: dict[str, FloatArray]
    gradient: FloatArray
    step: int = 0
    reference: str = ""
    """Fingerprint of the reference policy."""

    def __post_init__(self) -> None:
        self.reference = self.reference or self.fingerprint

    @property
    def fingerprint(self) -> str:
        return hashlib.sha256(save(self.factors)).hexdigest()

    def reference_logprobs(self, tokens: IntArray) -> FloatArray:
        """Equal to the policy's at the start of a phase, up to 0.1 nats lower a token afterwards."""
        moved = self.reference != self.fingerprint
        return _logprobs(tokens) - np.float32(moved * int(self.fingerprint[:2], 16) / 2560)

    def info(self, adapter_id: str) -> AdapterInfo:
        return AdapterInfo(adapter_id, self.step, sum(f.size for f in self.factors.values()), self.fingerprint)


@dataclass
class ScriptedEngine:
    """State of the engine process. `on_call` sees (verb, adapter_id) before each call and may raise, kill or restart."""

    on_call: Callable[[str, str | None], None] = lambda verb, adapter_id: None
    adapters: dict[str, _Adapter] = field(default_factory=dict)
    synced: dict[str, str] = field(default_factory=dict)
    tokens: dict[str, int] = field(default_factory=dict)
    calls: list[tuple[str, str | None]] = field(default_factory=list)
    down: bool = False

    def restart(self) -> None:
        """Loses every adapter, as a process that was killed and started again does."""
        self.adapters.clear()
        self.synced.clear()
        self.tokens.clear()

    def connect(self, holder_token: int, owner: str = "") -> AbstractContextManager[Verbs]:
        """What `Context.connect` wants."""
        return nullcontext(ScriptedClient(self, holder_token))


class ScriptedClient:
    """`engine.types.Verbs` for one holder."""

    def __init__(self, engine: ScriptedEngine, holder_token: int) -> None:
        self._engine, self._token = engine, holder_token

    def info(self) -> BaseModelInfo:
        self._enter("info", None)
        return BASE

    def render(self, conversations: Sequence[Sequence[Message]]) -> list[IntArray]:
        self._enter("render", None)
        return [np.frombuffer("".join(m["content"] for m in c).encode(), dtype=np.uint8).astype(np.int32) for c in conversations]

    def render_answers(self, conversations: Sequence[Sequence[Message]]) -> list[IntArray]:
        self._enter("render_answers", None)
        assert all(c[-1]["role"] == "assistant" for c in conversations)
        return [np.array([*c[-1]["content"].encode(), 0], dtype=np.int32) for c in conversations]

    def create_adapter(
        self, adapter_id: str, lora: LoraSettings, *, seed: int, weights: bytes | None = None, under: StackedOn | None = None
    ) -> AdapterInfo:
        self._enter("create_adapter", adapter_id)
        if under:  # the pair is as one adapter of the lower one's shape: what counts here is that it begins where that one is
            weights, lora = under.weights, under.lora
        factors = load(weights) if weights else {}
        for name in () if weights else lora.target_modules:
            parent = "self_attn" if name in ("q_proj", "k_proj", "v_proj", "o_proj") else "mlp"
            key = f"base_model.model.model.layers.0.{parent}.{name}"
            rng = np.random.default_rng([seed, len(factors)])
            factors[f"{key}.lora_A.weight"] = rng.standard_normal((lora.rank, WIDTH)).astype(np.float32)
            factors[f"{key}.lora_B.weight"] = np.zeros((WIDTH, lora.rank), dtype=np.float32)
        adapter = _Adapter(lora, factors, np.zeros(WIDTH, dtype=np.float32))
        self._engine.adapters[adapter_id] = adapter
        return adapter.info(adapter_id)

    def drop_adapter(self, adapter_id: str) -> None:
        self._enter("drop_adapter", adapter_id)
        self._engine.adapters.pop(adapter_id, None)
        self._engine.synced.pop(adapter_id, None)

    def sync(self, adapter_id: str) -> str:
        self._enter("sync", adapter_id)
        self._engine.synced[adapter_id] = self._adapter(adapter_id).fingerprint
        return self._engine.synced[adapter_id]

    def sample(self, adapter_id: str | None, requests: Sequence[SampleRequest]) -> list[list[Completion]]:
        self._enter("sample", adapter_id)
        fingerprint = "base"
        if adapter_id is not None:
            self._adapter(adapter_id)
            fingerprint = self._engine.synced[adapter_id]
        return [
            [_complete(f"{fingerprint}/{r.prompt_tokens.tobytes().hex()}/{p.seed}/{p.temperature}") for p in r.params] for r in requests
        ]

    def forward(
        self,
        adapter_id: str | None,
        groups: Sequence[TrainGroup],
        *,
        temperature: float,
        reference: bool = False,
        exported: bool = False,
    ) -> tuple[tuple[FloatArray, ...], ...]:
        self._enter("forward", adapter_id)
        logprobs = self._adapter(adapter_id).reference_logprobs if reference and adapter_id is not None else _logprobs
        return tuple(tuple(logprobs(c) for c in g.completions) for g in groups)

    def forward_backward(self, adapter_id: str, groups: Sequence[TrainGroup], loss: LossSettings) -> ForwardBackwardResult:
        self._enter("forward_backward", adapter_id)
        adapter = self._adapter(adapter_id)
        for group in groups:
            for i, (tokens, advantage, weight) in enumerate(zip(group.completions, group.advantages, group.weights, strict=True)):
                direction = np.frombuffer(hashlib.sha256(tokens.tobytes()).digest(), dtype=np.uint32).astype(np.float32) / 2**32
                num_tokens = len(tokens) if group.token_weights is None else float(group.token_weights[i].sum())
                signal = advantage if loss.kind not in ("sft", "dpo") else (-1.0) ** i
                factor = signal * weight * num_tokens / loss.denominator
                for given in (group.old_logprobs, group.sampler_logprobs):
                    factor *= 1.0 if given is None else 1.0 + float(given[i].mean())
                adapter.gradient += np.float32(factor) * direction
        return ForwardBackwardResult(
            loss=float(adapter.gradient.sum()),
            num_tokens=sum(len(t) for g in groups for t in g.completions),
            logprobs=tuple(tuple(_logprobs(c) for c in g.completions) for g in groups),
            metrics={"ratio": 1.0, "clip_fraction": 0.0, "kl": 0.0, "entropy": 0.5},
        )

    def optim_step(
        self, adapter_id: str, optimizer: OptimizerSettings, *, learning_rate: float, total_steps: int | None = None
    ) -> OptimResult:
        self._enter("optim_step", adapter_id)
        adapter = self._adapter(adapter_id)
        norm = float(np.linalg.norm(adapter.gradient))
        for key in adapter.factors:
            if key.endswith("lora_B.weight"):
                adapter.factors[key] = adapter.factors[key] + np.float32(learning_rate) * adapter.gradient[:, None]
        adapter.gradient = np.zeros(WIDTH, dtype=np.float32)
        adapter.step += 1
        return OptimResult(adapter.step, norm, adapter.fingerprint)

    def new_phase(self, adapter_id: str) -> AdapterInfo:
        self._enter("new_phase", adapter_id)
        adapter = self._adapter(adapter_id)
        adapter.reference = adapter.fingerprint
        return adapter.info(adapter_id)

    def save(self, adapter_id: str) -> SavedAdapter:
        self._enter("save", adapter_id)
        adapter = self._adapter(adapter_id)
        config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": adapter.lora.rank, "lora_alpha": adapter.lora.alpha}
        config["target_modules"] = sorted(adapter.lora.target_modules)
        return SavedAdapter(save(dict(sorted(adapter.factors.items())), metadata={"format": "pt"}), config, adapter.fingerprint)

    def save_state(self, adapter_id: str) -> bytes:
        self._enter("save_state", adapter_id)
        adapter = self._adapter(adapter_id)
        head = json.dumps({"step": adapter.step, "lora": adapter.lora.model_dump(mode="json"), "reference": adapter.reference}).encode()
        return len(head).to_bytes(4) + head + save(adapter.factors)

    def load_state(self, adapter_id: str, state: bytes) -> AdapterInfo:
        self._enter("load_state", adapter_id)
        size = int.from_bytes(state[:4])
        head: Mapping[str, object] = json.loads(state[4 : 4 + size])
        lora, step = LoraSettings.model_validate(head["lora"]), head["step"]
        assert isinstance(step, int)
        gradient = np.zeros(WIDTH, dtype=np.float32)
        self._engine.adapters[adapter_id] = _Adapter(lora, load(state[4 + size :]), gradient, step, str(head["reference"]))
        return self._engine.adapters[adapter_id].info(adapter_id)

    def _enter(self, verb: str, adapter_id: str | None) -> None:
        self._engine.calls.append((verb, adapter_id))
        self._engine.on_call(verb, adapter_id)
        if self._engine.down:
            raise Unavailable("The scripted engine is down.")
        if adapter_id is not None:
            newest = max(self._engine.tokens.get(adapter_id, 0), self._token)
            if self._token < newest:
                raise LeaseLost(f"Token {self._token} is older than {newest}.")
            self._engine.tokens[adapter_id] = newest

    def _adapter(self, adapter_id: str) -> _Adapter:
        if adapter_id not in self._engine.adapters:
            raise NotFound(f"No adapter {adapter_id}.", code="adapter_not_loaded")
        return self._engine.adapters[adapter_id]


def _complete(key: str) -> Completion:
    digest = hashlib.sha256(key.encode()).digest()
    text = WORDS[digest[0] % len(WORDS)]
    tokens = np.array([*text.encode(), digest[1], 0], dtype=np.int32)
    return Completion(tokens, _logprobs(tokens), text, "length" if digest[2] < 16 else "stop")


def _logprobs(tokens: IntArray) -> FloatArray:
    return -(tokens.astype(np.float32) + 1) / 256

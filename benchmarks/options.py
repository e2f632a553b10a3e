"""What every benchmark takes on its command line, and where its base model comes from."""

import argparse
import json
import shutil
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from core.settings import get_settings

NO_EOS_FILES = {
    "config.json": ("eos_token_id",), "generation_config.json": ("eos_token_id",), "tokenizer_config.json": ("eos_token",),
    "special_tokens_map.json": ("eos_token",),
}  # fmt: skip


def parser(about: str | None) -> argparse.ArgumentParser:
    """With --json and --quick; the module's docstring is its help."""
    options = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--json", action="store_true", help="one JSON object as the last line")
    options.add_argument(
        "--quick", action="store_true", help="a random model of 2 layers and a few tokens: shows that it runs, says nothing"
    )
    return options


@contextmanager
def base_models(*, quick: bool) -> Generator[tuple[Path, Path]]:
    """The base model's folder, and one of the same weights that no token ends.

    The second is how full-length completions are had from ours: its configuration names no end-of-sequence token, so none is looked for.
    """
    with tempfile.TemporaryDirectory(prefix="espalier-bench-") as scratch:
        base = _tiny_base(Path(scratch) / "tiny") if quick else _real_base()
        yield base, endless(base, Path(scratch) / "endless")


def endless(base: Path, target: Path) -> Path:
    """A folder like `base` (weights linked, not copied) whose configuration names no end-of-sequence token."""
    target.mkdir()
    for file in base.iterdir():
        if file.suffix == ".safetensors":
            (target / file.name).symlink_to(file.absolute())
        elif file.name in NO_EOS_FILES:
            values = json.loads(file.read_text())
            (target / file.name).write_text(json.dumps({**values, **dict.fromkeys(NO_EOS_FILES[file.name])}))
        elif file.is_file() and not file.name.startswith("."):
            shutil.copy(file, target / file.name)
    return target


def _real_base() -> Path:
    from engine.base_model import ensure_base_model

    return ensure_base_model(get_settings()).absolute()


def _tiny_base(folder: Path) -> Path:
    from tests.tiny import write_tiny_model

    # vLLM on CPU computes no heads narrower than 32.
    return write_tiny_model(folder, num_heads=2)

"""Which code made an adapter."""

import subprocess
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

_DISTRIBUTION = "espalier"
_GIT_TIMEOUT_S = 5.0


@lru_cache(maxsize=1)
def code_revision() -> str:
    """The package's version, with the commit where the code runs out of a git checkout: `0.1.0+g1a2b3c4d5e6f`, `.dirty` if changed."""
    try:
        release = version(_DISTRIBUTION)
    except PackageNotFoundError:
        release = "0+unknown"
    root = Path(__file__).resolve().parent.parent
    if not (root / ".git").exists():
        return release
    commit = _git(root, "rev-parse", "--short=12", "HEAD")
    if commit is None:
        return release
    return f"{release}+g{commit}" + (".dirty" if _git(root, "status", "--porcelain", "--untracked-files=no") else "")


def _git(root: Path, *arguments: str) -> str | None:
    try:
        result = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=_GIT_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return result.stdout.strip()

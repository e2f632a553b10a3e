"""Plots into docs/images, PNG and SVG. matplotlib comes with the extra `bench`."""

import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.curves import Curves
from benchmarks.engine_process import REPO

IMAGES = REPO / "docs/images"


def require_plots() -> None:
    """Says how to get matplotlib where it is not there.

    Raises:
        SystemExit: it is not there.
    """
    if find_spec("matplotlib") is None:
        sys.exit("Plots need matplotlib. Install it first: make bench-peers, or pip install -e '.[bench]'")


def plot_curves(sides: Sequence[Curves], name: str, title: str, *, folder: Path = IMAGES) -> list[Path]:
    """Reward by step: every seed thin, their mean thick."""
    figure, axes = _figure(title)
    for number, side in enumerate(sides):
        steps = range(1, len(side.mean) + 1)
        for curve in side.rewards:
            axes.plot(steps, curve, color=f"C{number}", alpha=0.3, linewidth=1)
        axes.plot(steps, side.mean, color=f"C{number}", linewidth=2.2, label=f"{side.name}, mean of {len(side.rewards)} seeds")
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("mean reward of the step's completions")
    axes.set_ylim(bottom=0)
    axes.legend()
    return _save(figure, name, folder)


def plot_distributions(
    states: Sequence[float], target: Sequence[float], policies: Mapping[str, Sequence[float]], name: str, title: str, *,
    folder: Path = IMAGES,
) -> list[Path]:  # fmt: skip
    """A target distribution filled, and what policies made of it as lines."""
    figure, axes = _figure(title)
    axes.fill_between(states, target, color="0.8", label="target")
    for label, policy in policies.items():
        axes.plot(states, policy, label=label, linewidth=1.6)
    axes.set_xlabel("state")
    axes.set_ylabel("probability")
    # A collapsed policy's one spike would flatten everything else.
    axes.set_ylim(0, 3 * max(target))
    axes.legend()
    return _save(figure, name, folder)


def _figure(title: str) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 4.2), layout="constrained")
    axes = figure.subplots()
    axes.set_title(title, fontsize=11)
    axes.grid(alpha=0.25)
    return figure, axes


def _save(figure: Any, name: str, folder: Path) -> list[Path]:
    from matplotlib import rc_context

    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{name}.{kind}" for kind in ("png", "svg")]
    # No date and no random ids in the files: the same figures make the same bytes.
    with rc_context({"svg.hashsalt": name}):
        for path in paths:
            figure.savefig(path, dpi=130, metadata={"Date": None} if path.suffix == ".svg" else {"Software": None})
    return paths

"""Repeated measurements and what they say. No torch here."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Spread:
    """Repeated measurements of one thing, in one unit."""

    values: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.values:
            raise ValueError("nothing was measured")

    @property
    def median(self) -> float:
        """Middle of the values; mean of the two middle ones of an even number."""
        return statistics.median(self.values)

    @property
    def low(self) -> float:
        """Least value."""
        return min(self.values)

    @property
    def high(self) -> float:
        """Greatest value."""
        return max(self.values)

    def __str__(self) -> str:
        if len(self.values) == 1:
            return f"{self.median:.2f}"
        return f"{self.median:.2f} ({self.low:.2f} to {self.high:.2f})"

    def as_json(self) -> dict[str, float | int]:
        """Median, least, greatest and number of values."""
        return {"median": self.median, "low": self.low, "high": self.high, "repeats": len(self.values)}


def alternate(runs: Sequence[Callable[[], float]], *, repeats: int, warm_up: int = 1) -> list[Spread]:
    """Measures several things in turns (a, b, a, b, ...), so that a machine that slows down slows all of them.

    Args:
        runs: each does its thing once and returns what it measured.
        warm_up: rounds that come first and do not count.
    Returns:
        One spread a run, in order.
    """
    measured: list[list[float]] = [[] for _ in runs]
    for turn in range(warm_up + repeats):
        for values, run in zip(measured, runs, strict=True):
            value = run()
            if turn >= warm_up:
                values.append(value)
    return [Spread(tuple(values)) for values in measured]


def ratio(slow: Spread, fast: Spread) -> float:
    """How many times as long the first takes, by medians."""
    return slow.median / fast.median

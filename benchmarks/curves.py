"""Whether two ways of training learn the same: reward curves over several seeds, and a test on the area under them.

Dimensions: S seeds, N steps.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise

MARGIN = 0.1
"""Difference in mean reward (graders give 0 to 1) that would matter; training moves it by about 0.6 on the demo's task."""

T_95 = {
    2: 2.920, 4: 2.132, 6: 1.943, 8: 1.860, 10: 1.812, 12: 1.782, 14: 1.761, 16: 1.746, 18: 1.734,
}  # fmt: skip
"""95% quantiles of Student's t by degrees of freedom."""
T_975 = {
    2: 4.303, 4: 2.776, 6: 2.447, 8: 2.306, 10: 2.228, 12: 2.179, 14: 2.145, 16: 2.120, 18: 2.101,
}  # fmt: skip


@dataclass(frozen=True)
class Curves:
    """Mean reward of every step, one curve a seed."""

    name: str
    rewards: tuple[tuple[float, ...], ...]

    @property
    def mean(self) -> list[float]:
        """Of the seeds, by step."""
        return [statistics.fmean(step) for step in zip(*self.rewards, strict=True)]

    @property
    def areas(self) -> list[float]:
        """Mean over the steps, by seed: the area under the curve, on the reward's own scale."""
        return [statistics.fmean(curve) for curve in self.rewards]

    def finals(self, num_last: int = 2) -> list[float]:
        """Mean over the last steps, by seed."""
        return [statistics.fmean(curve[-num_last:]) for curve in self.rewards]

    @property
    def roughness(self) -> float:
        """Mean over seeds of the largest fall from one step to the next: 0 for a curve that only rises."""
        falls = [max((a - b for a, b in pairwise(curve)), default=0.0) for curve in self.rewards]
        return statistics.fmean(max(fall, 0.0) for fall in falls)


@dataclass(frozen=True)
class Comparison:
    """Two sides' values of one statistic, one value a seed."""

    first: tuple[float, ...]
    second: tuple[float, ...]

    @property
    def difference(self) -> float:
        """Mean of the first less mean of the second."""
        return statistics.fmean(self.first) - statistics.fmean(self.second)

    @property
    def standard_error(self) -> float:
        """Of the difference, by the pooled variance of both sides."""
        pooled = (statistics.variance(self.first) + statistics.variance(self.second)) / 2
        return math.sqrt(2 * pooled / len(self.first))

    @property
    def half_width(self) -> float:
        """Of the 90% confidence interval of the difference (Student's t, 2 (S - 1) degrees of freedom)."""
        return T_95[self._freedom] * self.standard_error

    @property
    def detected(self) -> bool:
        """Whether a two-sided t test at 5% sees a difference: more than seeds do by themselves."""
        return abs(self.difference) > T_975[self._freedom] * self.standard_error

    @property
    def shown_equivalent(self) -> bool:
        """Whether two one-sided t tests at 5% put the difference within the margin: its 90% interval lies inside."""
        return abs(self.difference) + self.half_width <= MARGIN

    @property
    def permutation_p(self) -> float:
        """Share of all ways to deal the values out to two sides whose means differ at least as much; no less than 0.1 at 3 seeds."""
        values = [*self.first, *self.second]
        total, count, size = sum(values), len(values), len(self.first)
        differences = [
            abs(sum(values[i] for i in chosen) / size - (total - sum(values[i] for i in chosen)) / (count - size))
            for chosen in combinations(range(count), size)
        ]
        return sum(d >= abs(self.difference) - 1e-12 for d in differences) / len(differences)

    @property
    def _freedom(self) -> int:
        return 2 * (len(self.first) - 1)

    def as_json(self) -> dict[str, object]:
        """All figures."""
        return {
            "difference": self.difference, "interval_90": [self.difference - self.half_width, self.difference + self.half_width],
            "detected": self.detected, "shown_equivalent": self.shown_equivalent, "permutation_p": self.permutation_p,
            "first": list(self.first), "second": list(self.second), "margin": MARGIN,
        }  # fmt: skip


def compare(first: Curves, second: Curves) -> dict[str, Comparison]:
    """Area under the curves and end of the curves.

    Raises:
        ValueError: not the same number of seeds on both sides, or not 2 to 10 of them.
    """
    if len(first.rewards) != len(second.rewards) or not 2 <= len(first.rewards) <= 10:
        raise ValueError(f"{len(first.rewards)} and {len(second.rewards)} seeds; give 2 to 10, as many on both sides")
    return {
        "area": Comparison(tuple(first.areas), tuple(second.areas)), "final": Comparison(tuple(first.finals()), tuple(second.finals())),
    }  # fmt: skip


def same(comparisons: Mapping[str, Comparison]) -> bool:
    """The test: of area and of final reward alike, no difference is detected and what there is lies within the margin."""
    return all(not c.detected and abs(c.difference) <= MARGIN for c in comparisons.values())


def summary(comparisons: Mapping[str, Comparison], names: Sequence[str]) -> str:
    """Two lines a statistic, for people."""
    lines: list[str] = []
    for what, c in comparisons.items():
        low, high = c.difference - c.half_width, c.difference + c.half_width
        lines.append(
            f"{what}: {statistics.fmean(c.first):.3f} ({names[0]}), {statistics.fmean(c.second):.3f} ({names[1]}), difference "
            f"{c.difference:+.3f}, 90% interval {low:+.3f} to {high:+.3f}, permutation p {c.permutation_p:.2f}"
        )
        told = "a difference is detected" if c.detected else "no difference is detected"
        lines.append(f"  {told}; equivalence is {'' if c.shown_equivalent else 'not '}shown at a margin of {MARGIN:g}")
    return "\n".join(lines)

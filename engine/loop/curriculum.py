"""Which rows a step takes. What has to outlive a restart is in `Curriculum.memory`; everything else follows from seed and step."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from core.contracts import JobSpec
from engine.loop.rows import PromptRow, digest, rows_of_step


@dataclass(frozen=True)
class RowMemory:
    """What is known of a row that was met."""

    row: int
    due: float
    """Round in which it comes again."""
    reward: float | None
    """Mean, the newest one counting most; None where none was given."""


Memory = Sequence[RowMemory]
FRESH_SHARE = 0.5
"""What a row's newest mean reward counts against all earlier ones: the policy that earned those is gone."""


class Curriculum:
    """Rows by epochs (mode none), or by when they are due.

    A row of weight w that was met is due again 1 / w rounds later, and within a round by chance: rows of weight 1 come once an epoch, a row
    of weight w comes w times as often. In mode difficulty only the easiest rows are open at first.

    Args:
        num_steps: of the job, a warm-up's aside; mode difficulty opens the last row at ramp * num_steps.
        memory: `memory()` at the step from which the job goes on.
    """

    def __init__(self, spec: JobSpec, rows: Sequence[PromptRow], num_steps: int, memory: Memory = ()) -> None:
        self._seed, self._settings, self._num_rows = spec.seed, spec.curriculum, len(rows)
        self._rows_per_step, self._num_steps = spec.prompts_per_step(len(rows)), num_steps
        self._by_difficulty = range(len(rows))
        if self._settings.mode == "difficulty":
            field = self._settings.difficulty_field
            self._by_difficulty = sorted(range(len(rows)), key=lambda row: (float(rows[row].item[field]), row))
        self._due = [0.0] * len(rows)
        self._reward: list[float | None] = [None] * len(rows)
        for known in memory:
            self._due[known.row], self._reward[known.row] = known.due, known.reward

    def rows_of(self, step: int) -> Iterator[int]:
        """The rows of step `step` (0 for the first): its own come first, then, without end, those that may take the place of others.

        Take a step's rows before telling `observe` of them.
        """
        if self._settings.mode == "none":
            own = rows_of_step(self._seed, self._num_rows, self._rows_per_step, step)
            yield from own
            order = sorted(range(self._num_rows), key=lambda row: digest("replacement", self._seed, step, row))
            yield from (row for row in order if row not in own)
        else:
            order = sorted(self._open(step), key=lambda row: self._due[row] + self._chance(row))
        while True:
            yield from order

    def observe(self, row: int, reward: float | None) -> None:
        """Tells that a row was met.

        Args:
            reward: mean of its completions' rewards; None where none has one.
        """
        if self._settings.mode == "none":
            return
        if reward is not None:
            known = self._reward[row]
            self._reward[row] = reward if known is None else FRESH_SHARE * reward + (1 - FRESH_SHARE) * known
        self._due[row] += 1 / self.weight(row)

    def weight(self, row: int) -> float:
        """How often a row is met, against 1 of others."""
        reward = self._reward[row]
        if self._settings.mode != "pass_rate" or reward is None:
            return 1.0
        in_between = self._settings.hopeless_below <= reward <= self._settings.easy_above
        return 1.0 if in_between else self._settings.min_weight

    def num_open(self, step: int) -> int:
        """How many rows step `step` may take, the easiest ones; at least as many as a step has."""
        if self._settings.mode != "difficulty":
            return self._num_rows
        share = min(1.0, (step + 1) / (self._settings.ramp * self._num_steps))
        return max(self._rows_per_step, math.ceil(share * self._num_rows))

    def memory(self) -> Memory:
        """What a job that goes on from here has to know."""
        known = zip(self._due, self._reward, strict=True)
        return [RowMemory(row, due, reward) for row, (due, reward) in enumerate(known) if due]

    def _open(self, step: int) -> Sequence[int]:
        return self._by_difficulty[: self.num_open(step)]

    def _chance(self, row: int) -> float:
        return int.from_bytes(digest("due", self._seed, row, self._due[row])[:6]) / 2**48

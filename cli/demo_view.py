"""What `espalier demo` shows: the job's progress as it trains, then base and adapter side by side."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.live import Live
from rich.table import Table

_BARS = "▁▂▃▄▅▆▇█"


@dataclass(frozen=True)
class Answer:
    """One held-out prompt, asked of base and adapter."""

    prompt: str
    wanted: str
    base: str
    adapter: str
    base_reward: float
    adapter_reward: float


@dataclass(frozen=True)
class Cost:
    """What one part of the demo took."""

    what: str
    seconds: float | None = None
    peak_memory_bytes: int | None = None


def sparkline(values: Sequence[float]) -> str:
    """Values from 0 to 1 as one bar each."""
    return "".join(_BARS[min(len(_BARS) - 1, max(0, int(value * len(_BARS))))] for value in values)


class Progress:
    """The job's steps: redrawn in place on a terminal, a line a step elsewhere.

    Args:
        num_steps: optimizer steps of the job.
    """

    def __init__(self, console: Console, num_steps: int) -> None:
        self._console, self._num_steps = console, num_steps
        self._steps: dict[int, dict[str, Any]] = {}
        self._status = ""
        self._started = time.monotonic()
        self._live = Live(console=console, refresh_per_second=4) if console.is_terminal else None

    def __enter__(self) -> Self:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._live:
            self._live.stop()

    def update(self, status: str, events: Sequence[dict[str, Any]]) -> None:
        """Shows what is new.

        Args:
            events: of the job, oldest first; metrics events carry `step` and the step's numbers.
        """
        fresh = [
            e["data"] for e in events if e["type"] == "metrics" and "reward_mean" in e["data"] and e["data"]["step"] not in self._steps
        ]
        if status != self._status:
            self._status = status
            if not self._live:
                self._console.print(f"job: {status}", highlight=False)
        for values in fresh:
            self._steps[int(values["step"])] = values
            if not self._live:
                self._console.print("  ".join(self._cells(values)), highlight=False)
        if self._live:
            self._live.update(self._table())

    def rewards(self) -> list[float]:
        """Mean reward of each step so far."""
        return [self._steps[step]["reward_mean"] for step in sorted(self._steps)]

    def _cells(self, values: dict[str, Any]) -> list[str]:
        step = int(values["step"])
        return [
            f"step {step:>2}/{self._num_steps}", f"reward {values['reward_mean']:.3f}", f"KL {values.get('kl', 0.0):.4f}",
            f"{values['tokens_per_s']:.0f} tok/s", f"{values['step_s']:.1f} s", f"{self._seconds_left(step):.0f} s left",
        ]  # fmt: skip

    def _seconds_left(self, step: int) -> float:
        last = [self._steps[s]["step_s"] for s in sorted(self._steps)[-3:]]
        return (self._num_steps - step) * sum(last) / len(last)

    def _table(self) -> Table:
        table = Table.grid(padding=(0, 2))
        done = max(self._steps, default=0)
        table.add_row("job", f"{self._status}, step {done}/{self._num_steps}, {time.monotonic() - self._started:.0f} s")
        if self._steps:
            rewards = self.rewards()
            table.add_row("reward", f"[bold]{sparkline(rewards)}[/]  {rewards[0]:.3f} → {rewards[-1]:.3f}")
            table.add_row("last step", ", ".join(self._cells(self._steps[done])[1:]))
        return table


def show_answers(console: Console, answers: Sequence[Answer], num_shown: int = 6) -> None:
    """A few answers side by side, then the means over all of them."""
    table = Table(title="Held-out prompts", show_lines=True)
    for heading in ("customer writes", "base answers", "", "adapter answers", ""):
        table.add_column(heading, overflow="fold", justify="right" if heading == "" else "left", no_wrap=heading == "")
    for answer in answers[:num_shown]:
        cells = (answer.prompt, answer.base, f"{answer.base_reward:.2f}", answer.adapter, f"{answer.adapter_reward:.2f}")
        # Text, not markup: a model may answer with brackets.
        table.add_row(*(cell.replace("[", r"\[") for cell in cells))
    console.print(table)
    num = len(answers)
    for name in ("base", "adapter"):
        mean = sum(getattr(a, f"{name}_reward") for a in answers) / num
        exact = sum(getattr(a, name).strip() == a.wanted for a in answers)
        console.print(f"{name + ':':9} mean reward {mean:.3f}, exactly right {exact} of {num}", highlight=False)


def show_costs(console: Console, costs: Sequence[Cost]) -> None:
    """Seconds and peak memory, part by part."""
    table = Table(title="What it cost")
    for heading in ("part", "seconds", "peak memory, MiB"):
        table.add_column(heading, justify="left" if heading == "part" else "right")
    for cost in costs:
        seconds = "" if cost.seconds is None else f"{cost.seconds:.1f}"
        memory = "" if cost.peak_memory_bytes is None else f"{cost.peak_memory_bytes / 2**20:.0f}"
        table.add_row(cost.what, seconds, memory)
    console.print(table)

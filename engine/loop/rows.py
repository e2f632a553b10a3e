"""Rows of a job's files, and the draws that follow from a job's seed."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from engine.types import Message


@dataclass(frozen=True)
class PromptRow:
    """One row of a training or validation file."""

    messages: tuple[Message, ...]
    """The prompt: what the policy answers."""
    item: Mapping[str, Any]
    """The row's other fields."""
    answers: tuple[str, ...] = ()
    """What a supervised step learns from: the reference answer; the preferred and the other answer in dpo."""


@dataclass(frozen=True)
class StepResult:
    """What one step did."""

    step: int
    """Steps done, this one included."""
    metrics: dict[str, float]
    fingerprint: str
    """Of the adapter after the step."""


def rows_of_step(seed: int, num_rows: int, rows_per_step: int, step: int) -> list[int]:
    """Rows of a step without a curriculum; the data position follows from the step alone, so a resume is exact.

    Epochs are permutations of their own, laid end to end and cut into steps: a step may end one epoch and begin the next.

    Args:
        step: 0 for the first.
    """
    positions = range(step * rows_per_step, (step + 1) * rows_per_step)
    return [_permutation(seed, num_rows, p // num_rows)[p % num_rows] for p in positions]


def sample_seed(job_seed: int, step: int, row: int, k: int) -> int:
    """Seed of a completion, 0 to 2**31 - 1: of its own for each step, row and place k in the group, the same at every try."""
    return int.from_bytes(digest("sample", job_seed, step, row, k)[:4]) >> 1


def digest(*parts: object) -> bytes:
    """32 bytes that any draw of a job can be made of; no library's generator, whose streams may change between versions."""
    return hashlib.sha256("/".join(map(str, parts)).encode()).digest()


@lru_cache(maxsize=8)
def _permutation(seed: int, num_rows: int, epoch: int) -> tuple[int, ...]:
    return tuple(sorted(range(num_rows), key=lambda row: digest("row", seed, epoch, row)))

"""What this machine reaches on a model's own matrix products, and how fast it reads memory: the roofline of a run.

Every shape is timed by itself over weights that no cache holds, as a model's are, and weighed by the work that the model has in it. Run it
while nothing else computes.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.arithmetic import Matrix, ModelShape

COLD_BYTES = 96 * 2**20
"""Weights that are cycled through; more than a last-level cache holds."""
MIN_S = 0.25
"""Least time spent on a shape."""


@dataclass(frozen=True)
class ShapeRate:
    """Rate of one weight matrix at a number of rows."""

    matrix: Matrix
    forward: float
    """Operations a second of activations times weights."""
    backward: float
    """The same of gradients times weights, towards the inputs."""


@dataclass(frozen=True)
class MatrixRate:
    """Rates of all matrices of a model at one number of rows."""

    num_rows: int
    dtype: str
    shapes: tuple[ShapeRate, ...]

    @property
    def forward(self) -> float:
        """Operations a second of a whole forward, were it matrix products alone."""
        return _harmonic([(s.matrix.size * s.matrix.count, s.forward) for s in self.shapes])

    @property
    def both(self) -> float:
        """The same of forward and backward together."""
        return _harmonic([(s.matrix.size * s.matrix.count, rate) for s in self.shapes for rate in (s.forward, s.backward)])


def measure(shape: ModelShape, num_rows: int, dtype: torch.dtype, *, threads: int, min_s: float = MIN_S) -> MatrixRate:
    """Times every shape of the model at `num_rows` rows.

    Args:
        min_s: least time spent on each product, in seconds.
    """
    torch.set_num_threads(threads)
    with torch.no_grad():
        rates = tuple(_rate(matrix, num_rows, dtype, min_s) for matrix in shape.matrices)
    return MatrixRate(num_rows, str(dtype).removeprefix("torch."), rates)


def memory_bytes_per_s(*, threads: int, min_s: float = MIN_S) -> float:
    """Bytes a second that all threads together read from memory."""
    torch.set_num_threads(threads)
    values = torch.ones(2**27)  # half a GiB
    seconds = _seconds([values.sum], min_s)
    return values.numel() * values.element_size() / seconds


def _rate(matrix: Matrix, num_rows: int, dtype: torch.dtype, min_s: float) -> ShapeRate:
    copies = -(-COLD_BYTES // (matrix.size * dtype.itemsize))
    weights = [torch.randn(matrix.outputs, matrix.inputs).to(dtype) for _ in range(copies)]
    operations = 2.0 * num_rows * matrix.size
    x_NI, g_NO = torch.randn(num_rows, matrix.inputs).to(dtype), torch.randn(num_rows, matrix.outputs).to(dtype)
    forward = _seconds([_product(x_NI, weight.T) for weight in weights], min_s)
    backward = _seconds([_product(g_NO, weight) for weight in weights], min_s)
    return ShapeRate(matrix, operations / forward, operations / backward)


def _product(left: Tensor, right: Tensor) -> Callable[[], Tensor]:
    return lambda: left @ right


def _seconds(actions: Sequence[Callable[[], object]], min_s: float) -> float:
    """Mean seconds of one action, after a warm-up round of all."""
    for action in actions:
        action()
    done, started = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - started) < min_s or done == 0:
        for action in actions:
            action()
        done += len(actions)
    return elapsed / done


def _harmonic(work_and_rate: Sequence[tuple[float, float]]) -> float:
    return sum(work for work, _ in work_and_rate) / sum(work / rate for work, rate in work_and_rate)

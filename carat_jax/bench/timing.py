"""Wall time of a call that follows others of its kind, as a layer of a model does."""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax

from carat_jax.bench import report

WARM_UP, REPEATS = 3, 7
TRAIN_SECONDS = 0.02  # dispatches back to back in one measurement: the host's share vanishes
TURNOVER = 200 << 20  # bytes that rotate, at least: four times the second-level cache of Hopper
MOST_COPIES = 128  # each is a call of its own in the program, and takes time to compile
CALLS = 100  # in one dispatch, where a call takes microseconds

Step = Callable[[jax.Array, Any, Any], jax.Array]  # (x, buffer, shared) -> the next x


class Times(NamedTuple):
    """Seconds a call: the median of the measurements, the shortest and the longest."""

    median: float
    shortest: float
    longest: float

    def row(self, must_read: int | None) -> dict[str, float | None]:
        """Fields of a benchmark's row: microseconds, and how they compare to the floor.

        Args:
          must_read: bytes of the call; None where reading is not what bounds it.
        """
        bandwidth = report.read_bandwidth() if must_read else None
        floor = bandwidth and must_read / bandwidth
        return {
            "us": round(self.median * 1e6, 2),
            "us_min": round(self.shortest * 1e6, 2),
            "us_max": round(self.longest * 1e6, 2),
            "floor_us": report.rounded(floor and floor * 1e6, 2),
            "ratio": report.rounded(floor and self.median / floor, 2),
        }


def copies(one: int, layers: int = 1) -> int:
    """How many buffers of `one` byte each must rotate so that no cache level holds them.

    Args:
      one: bytes that a call reads of its buffer.
      layers: at least so many, where the model itself has them.

    Raises:
      ValueError: the device's memory holds less than two.
    """
    wanted = min(max(2, layers, math.ceil(TURNOVER / one)), MOST_COPIES)
    memory = (jax.devices()[0].memory_stats() or {}).get("bytes_limit")
    if memory is None:
        return wanted
    fit = int(0.4 * memory / one)  # a peer may need the same again
    if fit < 2:
        raise ValueError(
            f"two buffers of {one / 1e9:.1f} GB exceed 40 % of the device's memory "
            f"({memory / 1e9:.0f} GB): lower the batch or the context"
        )
    return min(wanted, fit)


class Chain:
    """Calls x = step(x, buffer, shared), buffer after buffer, all in one jitted function.

    What a call returns is what the next one takes, so none can be dropped or overlap another. The
    barrier gives every call its own operands in the compiler's eyes: nothing that `step` does to a
    buffer can be shared between calls or moved out of the loop.

    Attributes:
      program: the function (x, buffers, shared) -> x; compiled once for each set of shapes.
    """

    def __init__(self, step: Step, calls: int = CALLS) -> None:
        """step: traceable, returns the shape and dtype of x. calls: at least so many a dispatch."""
        self._calls = calls

        @jax.jit
        def program(x: jax.Array, buffers: Sequence[Any], shared: Any) -> jax.Array:
            def once_around(_: int, x: jax.Array) -> jax.Array:
                for buffer in buffers:
                    x, buffer = lax.optimization_barrier((x, buffer))
                    x = step(x, buffer, shared)
                return x

            return lax.fori_loop(0, self._rounds(buffers), once_around, x)

        @jax.jit
        def each(x: jax.Array, buffers: Sequence[Any], shared: Any) -> list[jax.Array]:
            return [step(x, buffer, shared) for buffer in buffers]

        self.program, self._each = program, each

    def _rounds(self, buffers: Sequence[Any]) -> int:
        return math.ceil(self._calls / len(buffers))

    def time(self, x: jax.Array, buffers: Sequence[Any], shared: Any) -> Times:
        """Times a call.

        Args:
          x: where the chain begins.
          buffers: pytrees of arrays, of one structure.
          shared: pytree of arrays that every call takes.
        """
        return measure(
            lambda: self.program(x, buffers, shared),
            jax.block_until_ready,
            self._rounds(buffers) * len(buffers),
        )

    def outputs(self, x: jax.Array, buffers: Sequence[Any], shared: Any) -> list[np.ndarray]:
        """What `step` returns for x and each of the buffers, in one program."""
        return jax.device_get(self._each(x, buffers, shared))


def measure(dispatch: Callable[[], Any], wait: Callable[[Any], Any], calls: int) -> Times:
    """Times trains of dispatches that the device works off one after the other.

    Args:
      dispatch: starts `calls` calls and may return before they are done.
      wait: takes what the last dispatch returned, and returns when all is done.
      calls: in one dispatch.
    """
    for _ in range(WARM_UP):
        wait(dispatch())
    train = max(1, math.ceil(TRAIN_SECONDS / _seconds(dispatch, wait, 1)))
    seconds = [_seconds(dispatch, wait, train) / (train * calls) for _ in range(REPEATS)]
    return Times(statistics.median(seconds), min(seconds), max(seconds))


def _seconds(dispatch: Callable[[], Any], wait: Callable[[Any], Any], train: int) -> float:
    begin = time.perf_counter()
    for _ in range(train):
        last = dispatch()
    wait(last)
    return time.perf_counter() - begin

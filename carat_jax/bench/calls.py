"""Seconds of calls that take a state for themselves and return the next one."""

import time
from collections.abc import Callable
from typing import Any

import jax

CALLS, REPEATS, WARM_UP = 3, 7, 3


def seconds(
    call: Callable[[Any], tuple[Any, Any]], state: Any, parts: int
) -> tuple[list[float], Any, Any]:
    """Times state -> (out, state), a call after the other without waiting in between.

    `Gemma.generate` dispatches its calls so, the next before it fetches the last one's tokens.

    Args:
      call: what is timed.
      state: to begin with.
      parts: of a call, such as decode steps.

    Returns:
      seconds of a part in each repeat; the last out and state.
    """
    times, out = [], None
    for _ in range(WARM_UP + REPEATS):
        jax.block_until_ready(state)
        begin = time.perf_counter()
        for _ in range(CALLS):
            out, state = call(state)
        jax.block_until_ready((out, state))
        times.append((time.perf_counter() - begin) / (CALLS * parts))
    return times[WARM_UP:], out, state

"""What every benchmark reports besides its own numbers, and how it lays out a table."""

import datetime
import functools
import os
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jaxlib

from carat_jax.memory import READ_BANDWIDTH

SETTINGS = (  # of the environment, that change what is measured
    "NCCL_ALGO",
    "NCCL_NVLS_ENABLE",
    "NCCL_PROTO",
    "XLA_FLAGS",
    "XLA_PYTHON_CLIENT_USE_TFRT_GPU_CLIENT",
)


def environment() -> dict[str, Any]:
    """Device, versions, date, (in a git checkout) the commit, and what is set for XLA and NCCL."""
    device = jax.devices()[0]
    return {
        "device": device.device_kind,
        "platform": device.platform,
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
        "python": platform.python_version(),
        "date": datetime.date.today().isoformat(),
        "commit": _commit(),
        "settings": {name: os.environ[name] for name in SETTINGS if name in os.environ},
    }


def say(what: str) -> None:
    """Tells whoever waits what has been done, on stderr, with the seconds since the first time.

    Weights of a large model and their programs take minutes, and a result comes at the end.
    """
    seconds = -_began() + time.perf_counter()
    print(f"{seconds:6.1f} s  {what}", file=sys.stderr, flush=True)


def read_bandwidth() -> float | None:
    """Bytes per second that this device reads, measured before; None for an unknown device."""
    return READ_BANDWIDTH.get(jax.devices()[0].device_kind)


def peak_memory() -> int | None:
    """Most bytes of device memory in use so far; None where the backend does not count."""
    return (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")


def table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Right-aligned columns; None prints as "–"."""
    cells = [list(columns)] + [["–" if c is None else str(c) for c in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in cells
    )


def rounded(value: float | None, digits: int) -> float | None:
    """round() that lets None pass."""
    return None if value is None else round(value, digits)


@functools.cache
def _began() -> float:
    return time.perf_counter()


def _commit() -> str | None:
    folder = Path(__file__).parent
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), "describe", "--always", "--dirty"],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None

"""Attention in float64 NumPy on the host: what a benchmark holds its results against."""

from collections.abc import Sequence
from typing import Any

import numpy as np

LARGEST_ERROR = 0.01  # several roundings to bfloat16: the kernels are within 0.004
BLOCK = 8192  # keys converted to float64 at once


def attention(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    q_position: np.ndarray,
    k_position: np.ndarray,
    window: int | None = None,
) -> np.ndarray:
    """Causal attention of the rows that share one KV head, scale 1.

    Args:
      q: [M, width] rows; q_position: int [M].
      k, v: [S, width] and [S, H] in any order; k_position: int [S], the position of each.
      window: keys that a row sees, itself included; None = all.

    Returns:
      float64 [M, H].
    """
    blocks = [slice(i, i + BLOCK) for i in range(0, len(k), BLOCK)]
    q = q.astype(np.float64)
    scores = np.concatenate([q @ k[block].astype(np.float64).T for block in blocks], axis=1)
    age = q_position[:, None] - k_position
    seen = (age >= 0) if window is None else (age >= 0) & (age < window)
    scores = np.where(seen, scores, -np.inf)
    p = np.exp(scores - scores.max(axis=1, keepdims=True))
    p /= p.sum(axis=1, keepdims=True)
    return sum(p[:, block] @ v[block].astype(np.float64) for block in blocks)


def judge(
    outputs: Sequence[np.ndarray], checked: Sequence[np.ndarray], expected: Sequence[np.ndarray]
) -> dict[str, Any]:
    """The fields "error" and "void" of a benchmark's row.

    Args:
      outputs: whole results; one number that is not finite makes the row void, error None.
      checked, expected: of each, the part that float64 tells: error is the worst
        ‖checked - expected‖ / ‖expected‖, and beyond LARGEST_ERROR the row is void.
    """
    if not all(np.isfinite(out.astype(np.float32)).all() for out in outputs):
        return {"error": None, "void": True}
    error = max(
        np.linalg.norm(a.astype(np.float64) - e) / np.linalg.norm(e)
        for a, e in zip(checked, expected, strict=True)
    )
    return {"error": float(f"{error:.2e}"), "void": not error <= LARGEST_ERROR}

"""residual_norm_matmul as the two ops that it is made of, each by its best implementation.

It takes whatever they take, and its gradient is theirs: the last resort of its op.
"""

import jax
from jax.typing import DTypeLike

from pallas_kernels.partial_sums import PartialSums
from pallas_kernels.residual_norm import residual_norm
from pallas_kernels.skinny_matmul import skinny_matmul


def residual_norm_matmul(
    h: jax.Array | None,
    y: jax.Array | PartialSums,
    w: jax.Array | None,
    next_w: jax.Array,
    matrix: jax.Array,
    *,
    eps: float,
    out: DTypeLike,
    scale: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array | PartialSums]:
    """See `pallas_kernels.residual_norm_matmul.residual_norm_matmul`."""
    h, x = residual_norm(h, y, w, next_w, eps=eps, scale=scale)
    return h, skinny_matmul(x, matrix, out=out, partial=True)

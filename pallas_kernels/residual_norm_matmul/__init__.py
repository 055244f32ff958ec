"""From one product of a decoder layer to the next: norm, residual sum, norm, product."""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels import dispatch
from pallas_kernels.partial_sums import PartialSums, summed
from pallas_kernels.residual_norm import check_residual
from pallas_kernels.residual_norm_matmul import apart, mosaic

# Best first, by a script that is not kept: "norm_within_product" in
# benchmarks/h200/kernels_31b.json (6902df1).
IMPLEMENTATIONS = {
    "mosaic": mosaic.residual_norm_matmul,
    "apart": apart.residual_norm_matmul,
}


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
    partial: bool = False,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array | PartialSums]:
    """`residual_norm`, then `skinny_matmul` of the norm: to the bit, what the two give.

    Args:
      h, y: [M, D]; h and w may be None, as in `residual_norm`.
      w, next_w, eps, scale: as in `residual_norm`.
      matrix: [D, F], like h, or y where h is None.
      out: dtype of the product.
      partial: the product may stay in pieces, where an implementation makes them.
      implementation: one of `IMPLEMENTATIONS`; None takes the best that accepts the inputs.

    Returns:
      The new residual h [M, D] as of `residual_norm`, and norm(of it, next_w) · matrix [M, F]; in
      pieces only if `partial`.

    Raises:
      ValueError: shapes or dtypes that do not fit, an unknown implementation.
      Unsupported: the named implementation cannot take these shapes, this dtype or the device.
    """
    check_residual(h, y, w, next_w, scale)
    like = y if h is None else h
    if matrix.ndim != 2 or (y.ndim, *y.shape[1:]) != (2, len(matrix)) or matrix.dtype != like.dtype:
        raise ValueError(
            f"y {y.shape} must be [M, D], and matrix {matrix.shape} {matrix.dtype} must be [D, F] "
            f"and {like.dtype}"
        )
    h, product = dispatch.run(
        IMPLEMENTATIONS,
        implementation,
        h,
        y,
        w,
        next_w,
        matrix,
        eps=eps,
        out=jnp.dtype(out),
        scale=scale,
    )
    return h, product if partial else summed(product)

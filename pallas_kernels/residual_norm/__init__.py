"""What stands between two products of a decoder layer: norm, residual sum, norm.

Of one row `residual_norm_matmul` does it within the product after it, where there is one.
"""

import jax

from pallas_kernels import dispatch
from pallas_kernels.partial_sums import PartialSums
from pallas_kernels.residual_norm import mosaic, xla

# Best first, all ops at once: `carat bench decode --config 31b`, benchmarks/h200, through XLA
# decode_31b_xla.json (f7b777c), by kernels decode_31b.json (dfe5ad5). Not measured apart.
IMPLEMENTATIONS = {"mosaic": mosaic.residual_norm, "xla": xla.residual_norm}


def residual_norm(
    h: jax.Array | None,
    y: jax.Array | PartialSums,
    w: jax.Array | None,
    next_w: jax.Array,
    *,
    eps: float,
    scale: jax.Array | None = None,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Adds the normed output y of a sublayer to the residual h, and norms the sum for the next.

    norm(x, w) = x / sqrt(mean(x²) + eps) · w over the last axis, in float32, rounded to the dtype
    of h (of y, where h is None); so are the sum and its product with `scale`.

    Args:
      h, y: [..., D]. h is None where the residual begins: then y itself is the sum.
      w: [D] of the norm of y; None with h.
      next_w: [D] of the norm of the sum.
      eps: added to the mean square.
      scale: [1], multiplies the sum; None = 1.
      implementation: one of `IMPLEMENTATIONS`; None takes the best that accepts the inputs.

    Returns:
      The new residual (h + norm(y, w)) · scale, or y · scale, and norm(of it, next_w), both
      [..., D].

    Raises:
      ValueError: shapes that do not fit, an unknown implementation.
      Unsupported: the named implementation cannot take these shapes, this dtype or the device.
    """
    check_residual(h, y, w, next_w, scale)
    return dispatch.run(
        IMPLEMENTATIONS,
        implementation,
        h,
        y,
        w,
        next_w,
        eps=eps,
        scale=scale,
    )


def check_residual(
    h: jax.Array | None,
    y: jax.Array | PartialSums,
    w: jax.Array | None,
    next_w: jax.Array,
    scale: jax.Array | None,
) -> None:
    """Raises ValueError unless the shapes fit."""
    D = y.shape[-1]
    if (h is None) != (w is None):
        raise ValueError("h and w come together: w is of the norm under which y is added to h")
    if (h is not None and (h.shape, w.shape) != (y.shape, (D,))) or next_w.shape != (D,):
        shapes = ["None" if x is None else x.shape for x in (h, w)]
        raise ValueError(
            f"h {shapes[0]} and y {y.shape} must be alike [..., D], w {shapes[1]} and next_w "
            f"{next_w.shape} [D]"
        )
    if scale is not None and scale.shape != (1,):
        raise ValueError(f"scale {scale.shape} must be [1]")

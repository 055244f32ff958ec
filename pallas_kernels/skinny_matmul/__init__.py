"""Products of few rows with large matrices: all of decode and verify is made of them."""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels import dispatch
from pallas_kernels.partial_sums import PartialSums, summed
from pallas_kernels.skinny_matmul import mosaic, xla

# "mosaic" for its bits; XLA took less time: `carat bench prefill --config 31b`, benchmarks/h200,
# "decode_ms" of prefill_31b_xla_products.json (6023333), and "steps" in kernels_31b.json (2bea395).
IMPLEMENTATIONS = {"mosaic": mosaic.skinny_matmul, "xla": xla.skinny_matmul}


def skinny_matmul(
    x: jax.Array,
    w: jax.Array,
    *,
    out: DTypeLike,
    transposed: bool = False,
    partial: bool = False,
    implementation: str | None = None,
) -> jax.Array | PartialSums:
    """x · w, accumulated in float32. Float32 operands keep full precision.

    Args:
      x: [M, D].
      w: [D, F], like x; [F, D] if `transposed`.
      out: dtype of the result.
      partial: the result may stay in pieces, where an implementation makes them.
      implementation: one of `IMPLEMENTATIONS`; None takes the best that accepts the inputs.

    Returns:
      [M, F]; in pieces only if `partial`.

    Raises:
      ValueError: shapes or dtypes that do not fit, an unknown implementation.
      Unsupported: the named implementation cannot take these shapes, this dtype or the device.
    """
    if x.ndim != 2 or w.ndim != 2 or w.shape[transposed] != x.shape[1] or x.dtype != w.dtype:
        form = "[F, D]" if transposed else "[D, F]"
        raise ValueError(
            f"x {x.shape} {x.dtype} must be [M, D] and w {w.shape} {w.dtype} {form} of one dtype"
        )
    y = dispatch.run(
        IMPLEMENTATIONS,
        implementation,
        x,
        w,
        out=jnp.dtype(out),
        transposed=transposed,
    )
    return y if partial else summed(y)

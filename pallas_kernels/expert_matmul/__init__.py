"""Rows times matrices of their own choice: the products of a mixture of experts."""

import jax
import jax.numpy as jnp

from pallas_kernels import dispatch
from pallas_kernels.expert_matmul import mosaic, xla

# Best first, by a script that is not kept (docs/kernels.md): nothing stored is of XLA's. The kernel
# within `carat bench decode --config 26b-a4b`: benchmarks/h200/decode_26b-a4b.json (879781d).
IMPLEMENTATIONS = {"mosaic": mosaic.expert_matmul, "xla": xla.expert_matmul}


def expert_matmul(
    x: jax.Array,
    w: jax.Array,
    index: jax.Array,
    *,
    absent: bool = False,
    implementation: str | None = None,
) -> jax.Array:
    """Row i of x times matrix `index[i]` of w; of w, only the matrices named are read.

    Rows that name the same matrix must lie together (sorted by index, say), and share one read
    of it. A row's result does not depend on the other rows to the bit, as far as the
    implementation can keep that; "mosaic" keeps it for any other rows and any number of them.

    Args:
      x: [n, D], n >= 1; or [1, D], which is then each of the n rows.
      w: [E, D, F], or [E, D, 2, F] for gated experts: a gate matrix and an up matrix, and the
        result is gelu(x · gate) · (x · up), with the tanh form of GELU.
      index: int32 [n], in [0, E).
      absent: rows may have the index E, for no matrix: nothing is read for them, and their
        results are undefined.
      implementation: one of `IMPLEMENTATIONS`; None takes the best that accepts the inputs.

    Returns:
      [n, F] in the dtype of x and w. Accumulation and GELU are float32.

    Raises:
      ValueError: shapes or dtypes that do not fit, an unknown implementation.
      Unsupported: the named implementation cannot take these shapes, this dtype or the device.
    """
    if x.ndim != 2 or w.ndim not in (3, 4) or x.shape[1] != w.shape[1] or not len(x):
        raise ValueError(
            f"x {x.shape} [n, D] and w {w.shape} [E, D, F] or [E, D, 2, F]: D must agree, and n "
            "be at least 1"
        )
    if w.ndim == 4 and w.shape[2] != 2:
        raise ValueError(f"w {w.shape} [E, D, 2, F] must hold 2 matrices for each expert")
    if x.dtype != w.dtype:
        raise ValueError(f"x {x.dtype} and w {w.dtype} must have the same dtype")
    fits = index.ndim == 1 and index.size and len(x) in (1, len(index))
    if not fits or not jnp.issubdtype(index.dtype, jnp.integer):
        n = ", n at least 1" if len(x) == 1 else f" = [{len(x)}]"
        raise ValueError(f"index {index.shape} {index.dtype} must be integer [n]{n}")
    return dispatch.run(
        IMPLEMENTATIONS, implementation, x, w, index.astype(jnp.int32), absent=absent
    )

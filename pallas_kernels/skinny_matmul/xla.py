"""skinny_matmul in plain JAX: the reference, and the CPU path."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

# Weights. A row alone meets a matrix of no more as one of 8: for one row XLA takes kernels that
# are slower there on an H200, and whose bits differ from those for several.
SMALL_MATRIX = 2**24


def skinny_matmul(
    x: jax.Array,
    w: jax.Array,
    *,
    out: DTypeLike,
    transposed: bool = False,
) -> jax.Array:
    """See `pallas_kernels.skinny_matmul.skinny_matmul`."""
    M = x.shape[0]
    if M < 8 and w.size <= SMALL_MATRIX:
        x = jnp.pad(x, ((0, 8 - M), (0, 0)))
    precision = lax.Precision.HIGHEST if w.dtype == jnp.float32 else None
    w = w.T if transposed else w
    return jnp.matmul(x, w, precision=precision, preferred_element_type=out)[:M]

"""residual_norm in plain JAX: the reference, and the CPU path."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.partial_sums import PartialSums, summed


def residual_norm(
    h: jax.Array | None,
    y: jax.Array | PartialSums,
    w: jax.Array | None,
    next_w: jax.Array,
    *,
    eps: float,
    scale: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """See `pallas_kernels.residual_norm.residual_norm`."""
    y = summed(y)
    h = y if h is None else h + norm(y, w, eps).astype(h.dtype)
    if scale is not None:
        h = (h * scale).astype(h.dtype)
    return h, norm(h, next_w, eps).astype(h.dtype)


def norm(x: jax.Array, w: jax.Array, eps: float) -> jax.Array:
    """norm(x, w) as in `residual_norm`, float32 and not rounded."""
    x = x.astype(jnp.float32)
    x = x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)
    return x * w.astype(jnp.float32)

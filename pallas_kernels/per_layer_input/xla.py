"""per_layer_input in plain JAX: the reference, and the CPU path."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.partial_sums import PartialSums, summed
from pallas_kernels.skinny_matmul import xla


def per_layer_input(
    h: jax.Array,
    y: jax.Array | PartialSums,
    w: jax.Array,
    gate: jax.Array,
    inputs: jax.Array,
    projection: jax.Array,
    *,
    layer: int,
    eps: float,
) -> tuple[jax.Array, jax.Array]:
    """See `pallas_kernels.per_layer_input.per_layer_input`."""
    y = summed(y).astype(jnp.float32)
    y = y * lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + eps) * w.astype(jnp.float32)
    h = h + y.astype(h.dtype)
    g = xla.skinny_matmul(h, gate, out=h.dtype).astype(jnp.float32)
    a = jax.nn.gelu(g, approximate=True) * inputs[:, layer]
    return h, xla.skinny_matmul(a.astype(h.dtype), projection, out=h.dtype)

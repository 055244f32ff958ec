"""per_layer_input in plain JAX: the reference, and the CPU path."""

import jax
import jax.numpy as jnp

from pallas_kernels.partial_sums import PartialSums, summed
from pallas_kernels.residual_norm.xla import norm
from pallas_kernels.skinny_matmul.xla import skinny_matmul


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
    h = h + norm(summed(y), w, eps).astype(h.dtype)
    g = skinny_matmul(h, gate, out=h.dtype).astype(jnp.float32)
    a = jax.nn.gelu(g, approximate=True) * inputs[:, layer]
    return h, skinny_matmul(a.astype(h.dtype), projection, out=h.dtype)

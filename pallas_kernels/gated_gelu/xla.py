"""gated_gelu in plain JAX: the reference, and the CPU path."""

import jax
import jax.numpy as jnp

from pallas_kernels.partial_sums import PartialSums, summed


def gated_gelu(y: jax.Array | PartialSums) -> jax.Array:
    """See `pallas_kernels.gated_gelu.gated_gelu`."""
    y = summed(y)
    gate, up = y[..., 0, :].astype(jnp.float32), y[..., 1, :].astype(jnp.float32)
    return (jax.nn.gelu(gate, approximate=True) * up).astype(y.dtype)
